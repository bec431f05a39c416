"""Bodies that are made to cost: what is read of them is bounded, and others do not wait for them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from array import array
from functools import partial

import httpx
import pytest
from fake_engine import REPLY
from http_server import http_server
from pydantic import ValidationError
from test_serve_errors import error_of
from test_serve_long_prompts import TRIES, health_waits

from shadowkv.serve.anthropic.protocol import MessagesRequest
from shadowkv.serve.app import build_app
from shadowkv.serve.bodies import limits
from shadowkv.serve.bodies import reader as body_reader
from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.bodies.body import read_body, validated
from shadowkv.serve.bodies.reader import SHORT_BYTES, BodyReader
from shadowkv.serve.openai.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from shadowkv.serve.responses.protocol import ResponsesRequest

JSON = {"Content-Type": "application/json"}
TURN = {"role": "user", "content": "a"}
PART = {"type": "text", "text": "a"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
LONG_CALL = {"name": "f", "arguments": " " * (limits.MAX_TEXT_CHARS // 2 + 1)}
MANY_VALUES = {"name": "f", "arguments": json.dumps({"a": ["b"] * (limits.MAX_VALUES // 2)})}
LONG = json.dumps({"prompt": [*range(SHORT_BYTES)]}).encode()


def test_a_doubled_key_among_many_is_found_at_once():
    keys = ",".join(f'"{number}": 1' for number in range(limits.MAX_KEYS - 2))
    start = time.thread_time()
    with pytest.raises(ApiError, match="'x' occurs twice"):
        read_body(f'{{{keys}, "x": 1, "x": 1}}'.encode(), CompletionRequest)
    assert time.thread_time() - start < 5  # a count for every key takes half a minute


def test_an_object_of_too_many_keys():
    with pytest.raises(ApiError, match=f"at most {limits.MAX_KEYS}"):
        read_body(json.dumps(dict.fromkeys(map(str, range(limits.MAX_KEYS + 1)))).encode(), CompletionRequest)


@pytest.mark.parametrize(
    "model, body",
    [
        (ChatRequest, {"messages": [1] * 10**5}),
        (TokenizeRequest, {"messages": [1] * 10**5}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 10**5}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 8}] * 8_000}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * 10**5}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["a"] * 10**5}),
        (CompletionRequest, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(10**5)), "a")}),
        (CompletionRequest, {"prompt": [1.5] * 10**5}),
        (DetokenizeRequest, {"tokens": [1.5] * 10**5}),
    ],
)
def test_of_a_list_of_wrong_items_the_first_one_is_told(model, body):
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() == 1


TOO_MUCH = {
    "messages": (ChatRequest, {"messages": [TURN] * (limits.MAX_MESSAGES + 1)}),
    "content parts": (ChatRequest, {"messages": [{"role": "user", "content": [PART] * 5_000}] * 2}),
    "tool calls": (
        ChatRequest,
        {"messages": [{"role": "assistant", "tool_calls": [CALL] * (limits.MAX_MESSAGES // 2 + 1)}] * 2},
    ),
    "characters of arguments": (
        ChatRequest,
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": LONG_CALL}] * 2}]},
    ),
    "values of arguments": (
        ChatRequest,
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": MANY_VALUES}] * 2}]},
    ),
    "characters": (
        ChatRequest,
        {"messages": [{"role": "user", "content": "a" * (limits.MAX_TEXT_CHARS // 2 + 1)}] * 2},
    ),
    "name": (ChatRequest, {"messages": [{**TURN, "name": "a" * (limits.MAX_NAME_CHARS + 1)}]}),
    "model": (ChatRequest, {"messages": [TURN], "model": "a" * (limits.MAX_NAME_CHARS + 1)}),
    "prompts": (CompletionRequest, {"prompt": ["a"] * (limits.MAX_PROMPTS + 1)}),
    "prompt characters": (CompletionRequest, {"prompt": ["a" * (limits.MAX_TEXT_CHARS // 2 + 1)] * 2}),
    "token ids": (CompletionRequest, {"prompt": [[1] * (limits.MAX_PROMPT_TOKENS // 2 + 1)] * 2}),
    "token id": (CompletionRequest, {"prompt": [2**31]}),
    "tokens": (DetokenizeRequest, {"tokens": [1] * (limits.MAX_PROMPT_TOKENS + 1)}),
    "text": (TokenizeRequest, {"prompt": "a" * (limits.MAX_TEXT_CHARS + 1)}),
    "stop": (CompletionRequest, {"prompt": "a", "stop": [str(i) for i in range(limits.MAX_STOP_STRINGS + 1)]}),
    "stop characters": (CompletionRequest, {"prompt": "a", "stop": "a" * (limits.MAX_STOP_CHARS + 1)}),
    "stop_token_ids": (CompletionRequest, {"prompt": "a", "stop_token_ids": [1] * (limits.MAX_STOP_TOKEN_IDS + 1)}),
    "logit_bias": (
        CompletionRequest,
        {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(limits.MAX_LOGIT_BIASES + 1)), 1.0)},
    ),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_is_too_much(name):
    model, body = TOO_MUCH[name]
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    (error,) = caught.value.errors()
    assert any(character.isdigit() for character in error["msg"]), error["msg"]  # how much would be right


def test_as_much_as_is_allowed():
    chat = ChatRequest.model_validate({"messages": [TURN] * limits.MAX_MESSAGES, "model": "a" * limits.MAX_NAME_CHARS})
    assert len(chat.messages) == limits.MAX_MESSAGES
    body = {
        "prompt": [1] * limits.MAX_PROMPT_TOKENS,
        "stop": ["a" * limits.MAX_STOP_CHARS] * limits.MAX_STOP_STRINGS,
        "stop_token_ids": [1] * limits.MAX_STOP_TOKEN_IDS,
        "logit_bias": dict.fromkeys(map(str, range(limits.MAX_LOGIT_BIASES)), 1.0),
    }
    assert len(CompletionRequest.model_validate(body).sampling()[0].stop) == limits.MAX_STOP_STRINGS


def test_limits_are_in_the_schema(call):
    named = call("GET", "/openapi.json").json()["components"]["schemas"]
    chat = named["ChatRequest"]["properties"]
    assert chat["messages"]["maxItems"] == limits.MAX_MESSAGES
    assert [one.get("maxItems", one.get("maxLength")) for one in chat["stop"]["anyOf"]] == [
        limits.MAX_STOP_CHARS,
        limits.MAX_STOP_STRINGS,
        None,  # null is the same as left out
    ]
    assert chat["stop_token_ids"]["anyOf"][0]["maxItems"] == limits.MAX_STOP_TOKEN_IDS
    assert chat["logit_bias"]["anyOf"][0]["maxProperties"] == limits.MAX_LOGIT_BIASES
    prompts = named["CompletionRequest"]["properties"]["prompt"]["anyOf"]
    assert prompts[0]["maxLength"] == limits.MAX_TEXT_CHARS and prompts[2]["maxItems"] == limits.MAX_PROMPTS


# -- long bodies ---------------------------------------------------------------------------------------------------


@pytest.fixture
def reader():
    reader = BodyReader(2**25)
    yield reader
    reader.close()


def read(reader, raw, model=CompletionRequest):
    return asyncio.run(reader.read(raw, model))


def test_the_process_needs_no_torch():
    """Nor do the bodies that it reads: its memory is limited."""
    read = "bodies.reader_process", "openai.protocol", "anthropic.protocol", "responses.protocol"
    names = ", ".join(f"shadowkv.serve.{name}" for name in read)
    code = f"import sys, {names}\nassert not {{'torch', 'numpy', 'fastapi', 'tokenizers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_long_bodies_are_read_as_short_ones(reader):
    found = read(reader, LONG)
    assert found == read_body(LONG, CompletionRequest) and found.prompt == [array("i", range(SHORT_BYTES))]
    text = json.dumps({"messages": [{"role": "user", "content": "naïve 💥" * SHORT_BYTES}], "user": [[[]]], "n": 2})
    chat = read(reader, text.encode(), ChatRequest)
    assert chat == read_body(text.encode(), ChatRequest) and chat.messages[0]["content"].startswith("naïve 💥")
    for raw in (LONG[:-1], LONG.replace(b"[", b"[null, "), LONG.replace(b"{", b'{"prompt": 1, ')):
        with pytest.raises(ApiError) as wanted:
            read_body(raw, CompletionRequest)
        with pytest.raises(ApiError) as caught:
            read(reader, raw)
        assert caught.value.body() == wanted.value.body()


def test_a_long_body_over_http(call, post, engine):
    engine.max_model_len = 10**6
    assert post("completions", prompt=[97] * SHORT_BYTES).json()["choices"][0]["text"] == REPLY
    assert error_of(post("completions", prompt="a", stop=["a"] * SHORT_BYTES))["param"] == "stop"
    error = error_of(call("POST", "/v1/completions", content=LONG[:-1], headers=JSON))
    assert "not valid JSON" in error["message"]


def test_a_fault_with_a_long_body_is_ours(engine, monkeypatch, caplog):
    def no_process(*_, **__):
        raise OSError("no more processes")

    with http_server(build_app(engine, "fake")) as url:
        monkeypatch.setattr(body_reader, "start_process", no_process)
        answer = httpx.post(f"{url}/v1/completions", content=LONG, headers=JSON, timeout=300)
    assert "the server's log has the details" in error_of(answer, 500)["message"]
    (record,) = [record for record in caplog.records if record.exc_info]
    assert isinstance(record.exc_info[1], OSError)


def test_a_process_that_dies_is_replaced(reader):
    read(reader, LONG)
    (process,) = reader.idle
    os.kill(process.pid, signal.SIGKILL)
    while not process.has_ended:
        time.sleep(0.01)
    with pytest.raises(ApiError, match="has died") as caught:
        read(reader, LONG)
    assert caught.value.status == 503
    assert read(reader, LONG).prompt


def test_a_body_that_takes_too_long(reader, monkeypatch):
    class Early(threading.Timer):
        def start(self):
            self.function()
            super().start()

    with monkeypatch.context() as patch:
        patch.setattr(body_reader, "SECONDS", 0.0)
        patch.setattr(body_reader, "SECONDS_PER_MIB", 0.0)
        patch.setattr(body_reader, "Timer", Early)  # before the process has read anything
        with pytest.raises(ApiError, match="more than 0 seconds") as caught:
            read(reader, LONG)
    assert caught.value.status == 413
    assert read(reader, LONG).prompt


def test_a_process_whose_time_runs_out_as_it_answers_is_not_kept(reader, monkeypatch):
    class Late(threading.Timer):
        def cancel(self):
            super().cancel()
            self.function()

    with monkeypatch.context() as patch:
        patch.setattr(body_reader, "Timer", Late)
        assert read(reader, LONG).prompt
    assert not reader.idle
    assert read(reader, LONG).prompt


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space")
def test_a_body_that_takes_too_much_memory(monkeypatch):
    monkeypatch.setattr(body_reader, "MEMORY_BYTES", 2**27)
    monkeypatch.setattr(body_reader, "MEMORY_PER_BYTE", 0)
    reader = BodyReader(2**25)
    try:
        with pytest.raises(ApiError, match=r"memory|died") as caught:
            read(reader, b'{"prompt": "a", "user": [' + b"1e9," * 4_000_000 + b"1]}")
        assert caught.value.status in (413, 503)
        assert read(reader, LONG).prompt
    finally:
        reader.close()


def test_processes_end_with_their_reader(reader):
    read(reader, LONG)
    (process,) = reader.idle
    reader.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_others_are_served_while_hostile_bodies_are_read(engine):
    bodies = (
        b'{"messages": [' + b"1," * 2_000_000 + b"1]}",
        b'{"user": [' + b"{}," * 250_000 + b"1," * 2_000_000 + b'1], "messages": [1]}',
    )
    with http_server(build_app(engine, "fake")) as url:
        for raw in bodies:
            send = partial(httpx.post, f"{url}/v1/chat/completions", content=raw, headers=JSON, timeout=300)
            for _ in range(TRIES):
                waits, answer = health_waits(url, send)
                if not waits:
                    break
            assert "messages[0]" in error_of(answer)["param"]
            assert not waits


PARTS = {
    (ResponsesRequest, "content parts"): {"input": [{"role": "user", "content": [{"type": "input_text"}] * 5_000}] * 2},
    (ResponsesRequest, "at most 8192"): {"input": [TURN] * (limits.MAX_MESSAGES + 1)},
    (ResponsesRequest, "characters"): {"input": [{**TURN, "content": "a" * (limits.MAX_TEXT_CHARS // 2 + 1)}] * 2},
    (ResponsesRequest, "JSON values"): {
        "input": [
            {"type": "function_call", "call_id": "c", **MANY_VALUES},
            {"type": "function_call", "call_id": "c", **MANY_VALUES},
        ]
    },
    (MessagesRequest, "content parts"): {
        "messages": [{"role": "user", "content": [{"type": "tool_result", "content": [PART] * 5_000}] * 2}]
    },
    (MessagesRequest, "at most 8192"): {"messages": [TURN] * (limits.MAX_MESSAGES + 1)},
    (MessagesRequest, "characters"): {"messages": [{**TURN, "content": "a" * (limits.MAX_TEXT_CHARS // 2 + 1)}] * 2},
    (MessagesRequest, "JSON values"): {
        "messages": [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"a": [1] * 40_000}}] * 2,
            },
            TURN,
        ]
    },
    (MessagesRequest, "characters of JSON"): {
        "messages": [TURN],
        "tools": [{"name": "f", "input_schema": {}, "description": "x" * limits.MAX_TOOLS_CHARS}],
    },
}


@pytest.mark.parametrize(("model", "reason"), PARTS)
def test_other_apis_have_the_same_limits(model, reason):
    body = {"max_tokens": 1, **PARTS[model, reason]} if model is MessagesRequest else PARTS[model, reason]
    with pytest.raises(ApiError) as caught:
        validated(body, model)
    assert reason in caught.value.message


def test_long_bodies_of_other_apis_are_read_by_another_process(call):
    long = "a" * SHORT_BYTES
    error = error_of(call("POST", "/v1/responses", json={"input": long}))
    assert error["param"] == "input" and "tokens" in error["message"]
    answer = call("POST", "/v1/messages", json={"messages": [TURN], "max_tokens": 9, "a_hint": long})
    assert answer.json()["content"] == [{"type": "text", "text": REPLY[:9]}]
