"""Every refusal: an OpenAI-shaped body that names the parameter."""

from __future__ import annotations

import logging

import pytest
from fake_engine import REPLY
from replies import events

from shadowkv.engine.request import EngineStopped
from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.bodies.body import validated
from shadowkv.serve.bodies.limits import MAX_UNKNOWN
from shadowkv.serve.bodies.parameters import unknown
from shadowkv.serve.bodies.reader import SHORT_BYTES
from shadowkv.serve.openai.protocol import CompletionRequest

UNSUPPORTED = {
    "tools": [{"type": "function"}],
    "tool_choice": "required",
    "response_format": {"type": "grammar"},
    "suffix": "x",
    "best_of": 2,
    "stop_regex": "x",
    "system": "x",
}
WRONG = {
    "temperature": "hot",
    "top_p": 0,
    "top_k": 1.5,
    "min_p": 2,
    "max_tokens": 0,
    "min_tokens": -1,
    "presence_penalty": 2.5,
    "frequency_penalty": -3,
    "logit_bias": {"5": 101},
    "n": 0,
    "seed": 2**63,
    "stop": [""],
    "stop_token_ids": ["a"],
    "stream": "yes",
    "stream_options": {"include_usage": True},
    "repetition_penalty": -1,
}


def error_of(response, status=400):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) - {"n_prompt_tokens", "n_ctx"} == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return error


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("name, value", [*UNSUPPORTED.items(), *WRONG.items()])
def test_parameters(post, engine, endpoint, name, value):
    error = error_of(post(endpoint, **{name: value}))
    assert error["param"].split("[")[0] == name and name in error["message"]
    assert not engine.prompts


def test_fewer_tokens_fit_than_an_answer_must_have(post, engine):
    """How many fit is known once the prompt's tokens are counted."""
    engine.max_model_len = 64
    error = error_of(post("completions", prompt=[5] * 63, min_tokens=2))
    assert error["param"] == "min_tokens" and "between 0 and max_tokens" in error["message"]
    assert not engine.prompts


def test_what_nobody_knows_has_no_effect_and_is_logged_once(post, call, caplog, monkeypatch):
    caplog.set_level(logging.WARNING, "shadowkv.serve.request_log")  # a command that ran here may have turned it on
    monkeypatch.setattr(unknown, "_recorded", set())
    for _ in range(2):
        messages = [{"role": "user", "content": "Hi", "cache_control": {}}]
        assert post("chat", messages=messages, no_such_hint=1).is_success
    assert [record.args for record in caplog.records] == [("cache_control",), ("no_such_hint",)]
    # Bodies that another process reads are logged here, too.
    assert post("completions", long_hint="x" * SHORT_BYTES).is_success
    assert caplog.records[-1].args == ("long_hint",) and caplog.records[-1].name == "shadowkv.serve.unknown"
    for number in range(MAX_UNKNOWN):
        unknown.record(f"{number}")
    assert len(caplog.records) == MAX_UNKNOWN


@pytest.mark.parametrize("bias", [{"a": 1}, {"5": "x"}, {"-1": 1}, {"9" * 5000: 1}, {"1.5": 1}, [1], 3])
def test_logit_bias(post, bias):
    assert error_of(post("completions", logit_bias=bias))["param"].startswith("logit_bias")


def test_only_an_echo_is_an_answer_of_no_tokens(post):
    assert error_of(post("completions", max_tokens=0, logprobs=1))["param"] == "max_tokens"


@pytest.mark.parametrize("prompt", [[], [[]], 3, {}, [1, "a"], [1.0], [True], [[1], ["a"]]])
def test_prompts(call, prompt):
    assert error_of(call("POST", "/v1/completions", json={"prompt": prompt}))["param"] == "prompt"


def test_a_prompt_is_required(call):
    assert error_of(call("POST", "/v1/completions", json={}))["param"] == "prompt"


@pytest.mark.parametrize(
    "messages, param",
    [
        ([], "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "content": "the template refuses this"}], "messages"),
    ],
)
def test_messages(post, messages, param):
    error = error_of(post("chat", messages=messages))
    assert error["param"] == param or error["param"].startswith(f"{param}.") or error["message"].startswith(param)


def test_top_logprobs_needs_logprobs(post):
    assert error_of(post("chat", top_logprobs=2))["param"] == "top_logprobs"
    error = error_of(post("chat", logprobs=True, top_logprobs=21))
    assert error["param"] == "top_logprobs" and error["message"].startswith("top_logprobs=21")


def test_a_long_list_of_wrong_tokens_gives_a_short_message(post):
    assert len(error_of(post("completions", prompt=["a", *range(10_000)]))["message"]) < 200
    assert len(error_of(post("completions", stop_token_ids=["a"] * 10_000))["message"]) < 600


def test_unknown_model(post, call):
    for response in (post("chat", model="other"), call("GET", "/v1/models/other")):
        error = error_of(response, 404)
        assert error["code"] == "model_not_found" and "other" in error["message"]


def test_body_is_no_json(call):
    headers = {"Content-Type": "application/json"}
    for content in (b'{"prompt": ', b"", b"[1]", b"\xff\xfe", b"[" * 100_000):
        error_of(call("POST", "/v1/completions", content=content, headers=headers))
    assert "Content-Type" in error_of(call("POST", "/v1/completions", content=b'{"prompt": "a"}'))["message"]


def test_unknown_path_and_method(call):
    error_of(call("GET", "/v2"), 404)
    error_of(call("GET", "/v1/completions"), 405)


@pytest.mark.parametrize("stream", [False, True])
def test_too_long(post, engine, stream):
    error = error_of(post("completions", prompt="x" * 150, max_tokens=60, stream=stream))
    assert error["code"] == "context_length_exceeded" and error["param"] == "max_tokens"
    assert all(number in error["message"] for number in ("151", "60", "200"))
    assert not engine.prompts


def test_one_bad_prompt_of_many_starts_none(post, engine):
    error_of(post("completions", prompt=["fine", "x" * 300]))
    assert not engine.prompts


@pytest.mark.parametrize(
    "prompt, status, message",
    [("FAIL", 500, "not finite"), ("DIE", 503, "the engine has died: boom")],
)
def test_failures_on_the_way(post, engine, prompt, status, message):
    assert message in error_of(post("completions", prompt=["fine", prompt]), status)["message"]
    assert not engine.running
    engine.is_alive = True
    *chunks, last = events(post("completions", prompt=prompt, stream=True))
    assert message in last["error"]["message"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == REPLY[:2]


@pytest.mark.parametrize("stream", [False, True])
def test_failures_at_once_have_their_status_in_a_stream_too(post, engine, stream):
    error = error_of(post("completions", prompt=["fine", "BUG"], stream=stream), 500)
    assert "internal error" in error["message"] and "secret" not in str(error)
    busy = post("chat", messages=[{"role": "user", "content": "BUSY"}], stream=stream)
    assert error_of(busy, 503)["code"] == "queue_full" and int(busy.headers["retry-after"]) > 0
    assert not engine.running


def test_dead_engine(post, call, engine):
    assert call("GET", "/health").status_code == 200
    engine.is_alive = False
    assert call("GET", "/health").status_code == 503
    error = error_of(post("chat", stream=True), 503)
    assert (error["code"], error["message"]) == ("engine_dead", "the engine has died: boom")


def test_an_engine_that_was_stopped_is_not_called_dead(post, engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.is_alive = False
    monkeypatch.setattr(engine, "end", lambda: EngineStopped("the engine has been stopped"))
    assert error_of(post("chat"), 503)["code"] == "server_stopping"


def test_a_full_queue_is_a_status_however_late_a_busy_event_loop_comes_to_it(
    post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shadowkv.serve.http.replies.PROMPTLY", 0)
    busy = post("chat", messages=[{"role": "user", "content": "BUSY"}], stream=True)
    assert busy.status_code == 503
    assert "Retry-After" in busy.headers


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"n": 129}, "n: Input should be less than or equal to 128, not 129 (less_than_equal)"),
        ({"temperature": "hot"}, 'temperature: Input should be a valid number, not "hot" (float_type)'),
        ({"stream": "maybe"}, 'stream: Input should be a valid boolean, not "maybe" (bool_type)'),
        ({"temperature": "h" * 100}, "temperature: Input should be a valid number (float_type)"),
        (
            {"prompt": None, "prompt_embeds": []},
            "prompt: Either prompt or prompt_embeds must be provided and non-empty. This server supports prompt, but "
            "not prompt_embeds",
        ),
        ({"top_p": 3}, "top_p: top_p=3.0 must be in (0, 1]"),
        ({"stop": 5}, "stop: must be a string or a list of up to 64 strings, not 5"),
        ({"stop": ["a", 5]}, "stop: must be a string or a list of up to 64 strings"),
        ({"stop": ["a"] * 65}, "stop: must be a string or a list of up to 64 strings"),
    ],
)
def test_a_refused_value_is_said_where_it_is_short(body: dict[str, object], said: str) -> None:
    with pytest.raises(ApiError) as caught:
        validated({"prompt": "a", "model": "m", **body}, CompletionRequest)
    assert caught.value.message == said
