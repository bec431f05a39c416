"""Several names of one model, and a path that a proxy puts before every other."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from app_client import AppClient
from fake_engine import FakeEngine

from shadowkv.serve.batch.answers import LineAnswers
from shadowkv.serve.batch.lines import LineRequest
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.wording import SettingsError

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/tokenize": {"prompt": "Hi"},
}


def ask(settings: ServerSettings, *requests: tuple[str, str, Any]) -> list[httpx.Response]:
    with AppClient(FakeEngine(), settings, model=settings.served_name("own")) as client:
        return [client(method, url, json=body) for method, url, body in requests]


@pytest.mark.parametrize("url", BODIES)
def test_every_name_is_answered_by_the_first(url: str) -> None:
    settings = ServerSettings(served_model_name=("first", "second"))
    bodies = [{**BODIES[url], "model": name} for name in ("first", "second", "own")]
    first, second, own = ask(settings, *(("POST", url, body) for body in bodies))
    assert first.status_code == second.status_code == 200
    assert own.status_code == 404 and "'own' does not exist; this server has 'first'" in own.text
    if "model" in first.json():
        assert first.json()["model"] == second.json()["model"] == "first"


def test_every_name_is_listed() -> None:
    settings = ServerSettings(served_model_name=("first", "second"))
    listed, one, none = ask(settings, *(("GET", f"/v1/models{name}", None) for name in ("", "/second", "/own")))
    assert [model["id"] for model in listed.json()["data"]] == ["first", "second"]
    assert one.json()["id"] == "second" and none.status_code == 404


def test_batches_know_every_name() -> None:
    answers = LineAnswers(FakeEngine(), "first", ServerSettings(served_model_name=("first", "second")))
    line = LineRequest("1", "a", "/v1/chat/completions", {**CHAT, "model": "second"}, 0, 0)
    record = asyncio.run(answers.record(line))
    assert record["response"]["status_code"] == 200 and record["response"]["body"]["model"] == "first", record


def test_a_path_before_all_others() -> None:
    settings = ServerSettings(root_path="/llm")
    for path in ("/v1/models", "/llm/v1/models"):  # whether the proxy has removed it
        assert ask(settings, ("GET", path, None))[0].status_code == 200
    (schema,) = ask(settings, ("GET", "/openapi.json", None))
    assert schema.json()["servers"] == [{"url": "/llm"}]
    for path in ("llm", "/llm/", "/"):
        with pytest.raises(SettingsError, match=f"root_path='{path}' must begin with a slash and end without one"):
            ServerSettings(root_path=path)


def test_keys_are_needed_under_a_path_too() -> None:
    settings = ServerSettings(root_path="/llm", api_key=("secret",))
    for path in ("/v1/models", "/llm/v1/models"):
        assert ask(settings, ("GET", path, None))[0].status_code == 401
    for path in ("/health", "/llm/health"):
        assert ask(settings, ("GET", path, None))[0].status_code == 200
