"""OpenAI's ``prediction``, and what the server tells of drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from prometheus_client.core import CounterMetricFamily

from shadowkv.engine.speculation.speculation import SpeculationStats
from shadowkv.serve.http.llama_metrics import llama_page

TEXT = {"type": "content", "content": "Hello there"}
PARTS = {"type": "content", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]}


@pytest.mark.parametrize("prediction", [TEXT, PARTS])
def test_its_tokens_go_to_an_engine_that_drafts(engine: FakeEngine, post: Any, prediction: dict[str, Any]) -> None:
    engine.drafts = True
    details = post("chat", prediction=prediction).json()["usage"]["completion_tokens_details"]
    assert engine.params[-1].predicted_token_ids == tuple(map(ord, "Hello there"))
    assert details == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert "completion_tokens_details" not in post("chat").json()["usage"]


def test_it_has_no_effect_where_nothing_drafts(engine: FakeEngine, post: Any) -> None:
    assert post("chat", prediction=TEXT).is_success
    assert post("completions", prediction=TEXT).is_success
    assert [params.predicted_token_ids for params in engine.params] == [(), ()]


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({"type": "other", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": ["x"]}, "prediction.content[0]"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0].text"),
        ({"type": "content", "content": [{"type": "image", "text": "x"}]}, "prediction.content[0].type"),
        ("x", "prediction"),
    ],
)
def test_a_wrong_prediction_is_refused(post: Any, prediction: object, param: str) -> None:
    answer = post("chat", prediction=prediction)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param
    assert error["message"].startswith(f"{param}: ") and ";" not in error["message"]


def test_metrics_have_vllms_names(
    engine: FakeEngine, call: Callable[..., httpx.Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "spec_decode" not in call("GET", "/metrics").text
    stats = engine.stats

    async def drafting(usage: bool = False) -> Any:
        return replace(await stats(usage), speculation=SpeculationStats(5, 20, 9, [5, 3, 1]))

    monkeypatch.setattr(engine, "stats", drafting)
    lines = call("GET", "/metrics").text.splitlines()
    found = {
        line.partition("{")[0].rpartition(":")[2]: float(line.split()[-1])
        for line in lines
        if "spec_decode_" in line and "{" in line
    }
    assert found["spec_decode_num_drafts_total"] == 5
    assert found["spec_decode_num_draft_tokens_total"] == 20
    assert found["spec_decode_num_accepted_tokens_total"] == 9
    places = [line for line in lines if "num_accepted_tokens_per_pos_total{" in line]
    assert [float(line.split()[-1]) for line in places] == [5, 3, 1] and 'position="2"' in places[2]


def test_llama_cpps_page_counts_drafts() -> None:
    counts = {"num_drafts": 5.0, "num_draft_tokens": 20.0, "num_accepted_tokens": 9.0}
    metrics = [CounterMetricFamily(f"llamacpp:spec_decode_{name}", name, value=count) for name, count in counts.items()]
    page = llama_page(metrics).decode()
    assert all(f"\nllamacpp:spec_decode_{name}_total {count}\n" in page for name, count in counts.items())
    assert "\nllamacpp:spec_decode_num_drafts_total 0.0\n" in llama_page([]).decode()
