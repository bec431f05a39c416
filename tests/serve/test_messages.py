"""/v1/messages and /v1/messages/count_tokens: what the model is asked, the answer's blocks, every event and refusal."""

from __future__ import annotations

import json

import anthropic
import httpx
import pytest
from app_client import answers
from fake_engine import REPLY
from http_server import http_server
from replies import named_events
from test_responses import ALL
from test_serve_tools import TEXT, WEATHER

from shadowkv.serve.anthropic.answers import MessagesAnswer, MessagesError, TokenCount
from shadowkv.serve.app import build_app
from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.http.settings import ServerSettings
from tests.waiting import wait_until

URL = "/v1/messages"
HI = [{"role": "user", "content": "Hi"}]
FUNCTION = WEATHER["function"]
TOOL = {"name": "weather", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "Rome?", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "So."},
            USE,
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
            {"type": "text", "text": "Well?"},
        ],
    },
]


@pytest.fixture
def send(ask):
    def post(reply=REPLY, url=URL, **body):
        more = {} if url != URL else {"max_tokens": len(reply)}
        return ask(url, reply, **{"messages": HI, **more, **body})

    post.engine = ask.engine
    return post


def test_blocks_become_the_messages_of_a_chat(send):
    send.engine.tokenizer.chat_template = "{{ tools }}"
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    for url in (URL, f"{URL}/count_tokens"):
        answer = send(url=url, messages=TURNS, system=system, tools=[TOOL], thinking={"type": "disabled"})
        assert answer.is_success
        messages, variables = send.engine.tokenizer.rendered
        assert variables == {"tools": [WEATHER], "enable_thinking": False} and messages == [
            {"role": "system", "content": "Be\nbrief."},
            {"role": "user", "content": "Rome?"},
            {
                "role": "assistant",
                "content": "So.",
                "tool_calls": [
                    {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": USE["input"]}}
                ],
                "reasoning_content": "Hm.",
            },
            {"role": "tool", "content": "sunny", "tool_call_id": "t1", "name": "weather"},
            {"role": "user", "content": "Well?"},
        ]
    TokenCount.model_validate(answer.json(), strict=True)
    assert answer.json()["input_tokens"] == len(send.engine.prompts[0])


def test_thoughts_text_and_calls_are_blocks_whole_and_streamed(send):
    body = send(ALL, tools=[TOOL]).json()
    MessagesAnswer.model_validate(body, strict=True)
    thought, text, call = body["content"]
    assert thought == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text == {"type": "text", "text": "Let me look."}
    assert (call["name"], call["input"], body["stop_reason"]) == ("weather", {"city": "Rome"}, "tool_use")
    usage = body["usage"]
    assert usage["cache_read_input_tokens"] == 2 and usage["output_tokens"] == len(ALL)
    assert usage["input_tokens"] + 2 == len(send.engine.prompts[0])
    events = named_events(send(ALL, tools=[TOOL], stream=True))
    kinds = [event["type"] for event in events]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    wanted = ["message_start", "ping", *block * 3, "message_delta", "message_stop"]
    assert [kind for place, kind in enumerate(kinds) if kind != kinds[place - 1]] == wanted
    deltas = {}
    for event in events:
        if event["type"] == "content_block_delta":
            kind, *_ = event["delta"].values()
            deltas.setdefault((event["index"], kind), []).append(event["delta"])
    assert [*deltas] == [(0, "thinking_delta"), (1, "text_delta"), (2, "input_json_delta")]
    arguments = deltas[2, "input_json_delta"]
    assert len(arguments) > 1 and json.loads("".join(delta["partial_json"] for delta in arguments)) == call["input"]
    begun = events[0]["message"]
    assert begun["usage"]["input_tokens"] == usage["input_tokens"] and begun["content"] == []
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None} and events[-2]["usage"] == usage


@pytest.mark.parametrize(
    "choice, schema",
    [
        ({"type": "any", "disable_parallel_tool_use": True}, "maxItems"),
        ({"type": "tool", "name": "weather"}, "city"),
        ({"type": "none"}, None),
    ],
)
def test_tool_choice(send, choice, schema):
    assert send(tools=[TOOL], tool_choice=choice).is_success
    asked = send.engine.params[-1].json_schema
    assert asked is None if schema is None else schema in asked


def test_parameters_reach_the_engine(send):
    config = {"format": {"type": "json_schema", "schema": FUNCTION["parameters"]}, "effort": "high"}
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 40}
    assert send(stop_sequences=["x", "y"], output_config=config, metadata={"user_id": "u"}, **asked).is_success
    params = send.engine.params[-1]
    assert {name: getattr(params, name) for name in asked} == asked
    assert params.stop == ("x", "y") and json.loads(params.json_schema) == FUNCTION["parameters"]
    assert send.engine.tokenizer.rendered[1] == {"reasoning_effort": "high"}


def test_why_it_stopped(send):
    assert send(max_tokens=4).json()["stop_reason"] == "max_tokens"
    assert send().json()["stop_reason"] == "end_turn"
    send.engine.stop_string = "x"
    assert send(stop_sequences=["x"]).json()["stop_sequence"] == "x"
    assert named_events(send(stop_sequences=["x"], stream=True))[-2]["delta"] == {
        "stop_reason": "stop_sequence",
        "stop_sequence": "x",
    }
    cut = send(TEXT, tools=[TOOL], max_tokens=TEXT.index("Rome")).json()
    assert (cut["content"][-1]["input"], cut["stop_reason"]) == ({}, "max_tokens")


WRONG = [
    ({"messages": []}, "messages"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": [*HI, {"role": "assistant", "content": [USE]}]}, "only text blocks"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "images, search"),
    ({"messages": [{"role": "user", "content": [USE]}]}, "'tool_use'"),
    ({"messages": [{"role": "assistant", "content": [TURNS[2]["content"][0]]}, *HI]}, "'tool_result'"),
    ({"messages": [{"role": "system", "content": "x"}]}, "role"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "name"),
    ({"tool_choice": {"type": "any"}}, "needs tools"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"top_k": "x"}, "top_k"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"tools": [TOOL], "output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
    ({"max_tokens": 5000}, "5000"),
]


def problem(answer, status, kind):
    assert answer.status_code == status, answer.text
    MessagesError.model_validate(answer.json(), strict=True)
    assert answer.json()["error"]["type"] == kind
    return answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "name, value", [("temperature", 0.5), ("stream", True), ("top_k", 3), ("max_tokens", 9), ("x", {})]
)
def test_a_count_may_have_any_field_of_a_message(send, name, value):
    answer = send(url=f"{URL}/count_tokens", **{name: value})
    if name == "max_tokens":
        assert "max_tokens" in problem(answer, 400, "invalid_request_error")
    else:
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("body, reason", WRONG)
def test_refusals_have_the_shape_of_the_api(send, body, reason):
    message = problem(send(**body), 400, "invalid_request_error")
    assert reason in message and "response_format" not in message
    assert not send.engine.prompts


def test_every_other_error_has_it_too(engine):
    settings = ServerSettings(api_key=("k",), max_body_mib=0.001, request_timeout=2.0)
    body = {"messages": HI, "max_tokens": 3}
    right, wrong = {"x-api-key": "k"}, {"x-api-key": "wrong"}

    def ask(headers=right, method="POST", url=URL, **more):
        return method, url, {"headers": headers, "json": {**body, **more}}

    hang = [{"role": "user", "content": "HANG"}]
    cases = [
        (401, "authentication_error", ask(wrong)),
        (401, "authentication_error", ask({})),
        (404, "not_found_error", ask(model="other")),
        (404, "not_found_error", ask(url=f"{URL}/nothing")),
        (405, "invalid_request_error", ask(method="PUT")),
        (413, "request_too_large", ask(system="x" * 2000)),
        (500, "api_error", ask(messages=[{"role": "user", "content": "BUG"}])),
        (503, "overloaded_error", ask(messages=[{"role": "user", "content": "BUSY"}], stream=True)),
        (504, "timeout_error", ask(messages=hang, max_tokens=10)),
        (400, "invalid_request_error", (*ask()[:2], {"headers": right, "content": b"{"})),
    ]
    for (status, kind, _), answer in zip(cases, answers(engine, settings, *(case[2] for case in cases)), strict=True):
        problem(answer, status, kind)
    assert ApiError("full", status=429).body(URL)["error"]["type"] == "rate_limit_error"
    both = [ask(), ask({"Authorization": "Bearer k"}), ask({"Authorization": "Bearer other", **right})]
    assert [answer.status_code for answer in answers(engine, settings, *both)] == [200] * 3


def test_anthropics_client(ask):
    engine = ask.engine
    settings = ServerSettings(
        reasoning_parser="qwen3", tool_call_parser="hermes", api_key=("k",), keep_alive_interval=0.05
    )
    with (
        http_server(build_app(engine, "fake", settings)) as url,
        anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client,
    ):
        asked = {"model": "fake", "max_tokens": len(ALL), "tools": [TOOL]}
        question = [{"role": "user", "content": "Rome?"}]
        engine.reply = ALL
        first = client.messages.create(messages=question, **asked)
        call = first.content[-1]
        assert call.input == {"city": "Rome"} and first.usage.cache_read_input_tokens == 2
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        turns = [*question, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        assert client.messages.count_tokens(model="fake", messages=turns, tools=[TOOL]).input_tokens > 100
        with client.messages.stream(messages=turns, **asked) as stream:
            assert "".join(stream.text_stream) == "Let me look."
            final = stream.get_final_message()
        assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
        assert final.content[-1].input == {"city": "Rome"} and final.usage.output_tokens == len(ALL)
        with pytest.raises(anthropic.BadRequestError, match="needs tools"):
            client.messages.create(model="fake", max_tokens=1, messages=question, tool_choice={"type": "any"})
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="x").messages.create(messages=question, **asked)
        with pytest.raises(anthropic.APIStatusError, match="not finite"):
            list(client.messages.create(messages=[{"role": "user", "content": "FAIL"}], stream=True, **asked))
        engine.silence = 3.0
        slow = {"messages": [{"role": "user", "content": "SLEEP"}], "model": "fake", "max_tokens": 9, "stream": True}
        assert next(event.type for event in client.messages.create(**slow)) == "message_start"
        raw = httpx.post(f"{url}{URL}", json=slow, headers={"x-api-key": "k"}, timeout=300).text
        assert raw.startswith('event: ping\ndata: {"type":"ping"}\n\n')
        engine.reply = REPLY
        stream = client.messages.create(messages=[{"role": "user", "content": "HANG"}], stream=True, **asked)
        next(iter(stream))
        assert engine.running
        stream.close()
        wait_until(lambda: not engine.running)


def test_the_other_routes_of_the_api_say_what_is_served(call):
    for url in ("/v1/embeddings", "/v1/rerank", "/v1/audio/speech"):
        error = call("POST", url, json={"input": "x"})
        assert error.status_code == 400 and "generates text" in error.json()["error"]["message"]
