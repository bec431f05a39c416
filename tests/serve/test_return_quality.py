"""What a server tells of its quality meter: for a request that asks, and for operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fake_engine import REPLY, FakeEngine
from test_page_routes import error_of, events

from shadowkv.engine.outputs import CheckedTokens

LENGTH = len(REPLY)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_usage_has_it_where_asked_for(engine: FakeEngine, post: Any, endpoint: str) -> None:
    engine.quality_meter = 0.5
    found = post(endpoint, return_quality=True, n=2).json()["usage"]["quality"]
    assert found == {"checked_tokens": 2 * (LENGTH // 2), "kl": pytest.approx(LENGTH / 16 / (LENGTH // 2))}
    streamed = events(post(endpoint, return_quality=True, stream=True, stream_options={"include_usage": True}))
    assert streamed[-1]["usage"]["quality"]["checked_tokens"] == LENGTH // 2
    assert "quality" not in post(endpoint).json()["usage"]
    assert error_of(post(endpoint, return_quality=1))["param"] == "return_quality"


def test_an_answer_without_checked_tokens_has_no_figure(engine: FakeEngine, post: Any) -> None:
    engine.quality_meter = 0.5
    usage = post("completions", return_quality=True, max_tokens=1).json()["usage"]
    assert usage["quality"] == {"checked_tokens": 0, "kl": None}


def test_servers_without_the_meter_refuse(post: Any) -> None:
    error = error_of(post("chat", return_quality=True))
    assert error["message"] == "return_quality=true needs a server with --quality-meter"
    assert error["param"] == "return_quality"


def test_metrics_have_the_sum_and_the_count(
    engine: FakeEngine, call: Callable[..., httpx.Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "quality_meter" not in call("GET", "/metrics").text
    stats = engine.stats

    async def checking(usage: bool = False) -> Any:
        return replace(await stats(usage), checked=CheckedTokens(40, 0.5))

    monkeypatch.setattr(engine, "stats", checking)
    page = call("GET", "/metrics").text
    assert 'shadowkv:quality_meter_kl_count{model_name="fake"} 40.0' in page
    assert 'shadowkv:quality_meter_kl_sum{model_name="fake"} 0.5' in page
