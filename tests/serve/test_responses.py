"""/v1/responses: what the model is asked, the answer's items, every event, and every refusal."""

from __future__ import annotations

import json
from functools import partial

import openai
import pytest
from fake_engine import REPLY
from http_server import http_server
from pydantic import BaseModel
from replies import named_events
from test_serve_errors import error_of
from test_serve_tools import TEXT, WEATHER

from shadowkv.serve.app import build_app
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.responses.answers import Response
from tests.waiting import wait_until

URL = "/v1/responses"
TOOL = {"type": "function", **WEATHER["function"]}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'}
EARTH = {"type": "namespace", "name": "earth", "description": "Of the planet.", "tools": [TOOL]}
ALL = f"<think>Hm.</think>{TEXT}"
"""Thoughts, text and a call."""


@pytest.fixture
def respond(ask):
    send = partial(ask, URL)
    send.engine = ask.engine
    return send


def test_items_become_the_messages_of_a_chat(respond):
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Rome?"}, {"type": "input_text", "text": "Now."}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "So.", "annotations": []}],
        },
        {**CALL, "id": "fc", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"role": "developer", "content": "Go on."},
    ]
    respond.engine.tokenizer.chat_template = "{{ tools }}"
    assert respond(REPLY, input=items, instructions="Be kind.", tools=[TOOL]).is_success
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    calls = [{"id": "c1", "type": "function", "function": function}]
    messages, variables = respond.engine.tokenizer.rendered
    assert variables == {"tools": [WEATHER]} and messages == [
        {"role": "system", "content": "Be kind.\n\nBe brief."},
        {"role": "user", "content": "Rome?\nNow."},
        {"role": "assistant", "content": "So.", "tool_calls": calls, "reasoning_content": "Hm."},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1", "name": "weather"},
        {"role": "system", "content": "Go on."},
    ]


def test_a_whole_answer_repeats_what_was_asked_for(respond):
    asked = {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 4,
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
    }
    body = respond(REPLY, input="Hi", store=True, **asked).json()
    Response.model_validate(body, strict=True)
    assert {name: body[name] for name in asked} == asked and body["store"] is True
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    (message,) = body["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", REPLY[:4])
    usage = body["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 2 and usage["output_tokens"] == 4
    assert usage["total_tokens"] == usage["input_tokens"] + 4
    params = respond.engine.params[-1]
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.9, 4)


@pytest.mark.parametrize("parallel", [True, False])
def test_thoughts_text_and_calls_are_items_whole_and_streamed(respond, parallel):
    asked = {"input": "Rome?", "tools": [TOOL], "max_output_tokens": len(ALL), "parallel_tool_calls": parallel}
    body = respond(ALL, **asked).json()
    Response.model_validate(body, strict=True)
    thought, message, call = body["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "Let me look."
    assert (call["name"], call["arguments"]) == ("weather", '{"city": "Rome"}')
    assert all(item["status"] == "completed" for item in body["output"])
    assert 3 <= body["usage"]["output_tokens_details"]["reasoning_tokens"] <= len("<think>Hm.</think>")
    events = named_events(respond(ALL, stream=True, **asked))
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [kind for place, kind in enumerate(kinds) if kind != kinds[place - 1]] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    streamed = events[-1]["response"]

    def said(response):
        return [
            {key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]
        ]

    assert said(streamed) == said(body)
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == streamed["output"]


def test_functions_in_namespaces_are_known_by_both_names(respond):
    respond.engine.tokenizer.chat_template = "{{ tools }}"
    earlier = {**CALL, "namespace": "earth"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    reply = '<tool_call>\n{"name": "earth__weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    items = [{"role": "user", "content": "Rome?"}, earlier, result]
    answer = respond(reply, input=items, tools=[EARTH]).json()
    messages, variables = respond.engine.tokenizer.rendered
    assert messages[1]["tool_calls"][0]["function"]["name"] == "earth__weather"
    assert [tool["function"]["name"] for tool in variables["tools"]] == ["earth__weather"]
    (call,) = answer["output"]
    assert (call["namespace"], call["name"], call["arguments"]) == ("earth", "weather", '{"city": "Oslo"}')
    assert answer["tools"] == [{**EARTH, "tools": [{"strict": None, **TOOL}]}]
    Response.model_validate(answer)
    forced = {"type": "function", "name": "earth__weather"}
    (call,) = respond('{"city": "Oslo"}', input="Oslo?", tools=[EARTH], tool_choice=forced).json()["output"]
    assert (call["namespace"], call["name"]) == ("earth", "weather")


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_of_the_text_alone(respond, stream):
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": len(ALL)}
    answer = respond(ALL, input="Rome?", tools=[TOOL], stream=stream, **asked)
    response = named_events(answer)[-1]["response"] if stream else answer.json()
    Response.model_validate(response)
    thought, message, _ = response["output"]
    (part,) = message["content"]
    assert "".join(score["token"] for score in part["logprobs"]).strip() == part["text"].strip() == "Let me look."
    assert all(len(score["top_logprobs"]) == 2 for score in part["logprobs"])
    assert "logprobs" not in thought["content"][0]
    if stream:
        deltas = [event for event in named_events(answer) if event["type"] == "response.output_text.delta"]
        assert [score for event in deltas for score in event["logprobs"]] == part["logprobs"]


def test_without_being_asked_there_are_no_log_probabilities(respond):
    (message,) = respond(REPLY, input="Hi", top_logprobs=0).json()["output"]
    assert message["content"][0]["logprobs"] == []


def test_progress_comes_as_llama_cpp_has_it(respond):
    events = named_events(respond(REPLY, input="A long text.", stream=True, return_progress=True))
    told = [event for event in events if "prompt_progress" in event]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert told and {event["type"] for event in told} == {"response.in_progress"}
    assert told[0]["prompt_progress"]["processed"] == 2
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert not any("prompt_progress" in event for event in named_events(respond(REPLY, input="Hi", stream=True)))


def test_effort_is_told_to_the_template(respond):
    respond(REPLY, input="Hi", reasoning={"effort": "low", "summary": "auto"}, chat_template_kwargs={"a": 1})
    assert respond.engine.tokenizer.rendered[1] == {"reasoning_effort": "low", "a": 1}
    respond(REPLY, input="Hi", reasoning={"effort": "none"})
    assert respond.engine.tokenizer.rendered[1] == {"reasoning_effort": "none", "enable_thinking": False}


WRONG = [
    ({}, "input"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ({"input": [{**CALL, "arguments": "["}]}, "input[0].arguments"),
    ({"input": [{"role": "assistant", "content": "the template refuses this"}]}, "input"),
    ({"conversation": "c"}, "conversation"),
    ({"background": True, "store": False}, "background"),
    ({"background": True, "stream": True}, "background"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 5000}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"type": "namespace", "name": "earth"}]}, "tools[0].tools"),
    ({"tools": [{**TOOL, "name": "earth__weather"}, EARTH]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "schema": {"title": "EMPTY"}}}}, "text.format"),
    ({"text": {"format": {"type": "json_object"}}, "tools": [TOOL]}, "text.format"),
    ({"stream_options": {"include_usage": True}, "stop": [""]}, "stop"),
]


@pytest.mark.parametrize("body, param", WRONG)
def test_refusals_name_the_field(respond, body, param):
    error = error_of(respond(REPLY, **({"input": "Hi"} if body and "input" not in body else {}), **body))
    assert error["param"] == param and "max_tokens" not in error["message"]
    assert not respond.engine.prompts


class City(BaseModel):
    city: str


def test_openais_client(ask):
    engine = ask.engine
    app = build_app(engine, "fake", ServerSettings(reasoning_parser="qwen3", tool_call_parser="hermes"))
    with http_server(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        create = partial(client.responses.create, model="fake", max_output_tokens=len(ALL), tools=[TOOL])
        engine.reply = ALL
        first = create(input="Rome?")
        assert first.output_text == "Let me look." and first.usage.input_tokens_details.cached_tokens == 2
        *_, call = first.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        engine.reply = REPLY
        assert create(input=[{"role": "user", "content": "Rome?"}, *first.output, result]).output_text == REPLY
        engine.reply = ALL
        with client.responses.stream(model="fake", input="Rome?", max_output_tokens=len(ALL), tools=[TOOL]) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            final = stream.get_final_response()
        assert text == final.output_text == "Let me look." and final.output[-1].arguments == '{"city": "Rome"}'
        engine.reply = json.dumps({"city": "Rome"})
        parsed = client.responses.parse(model="fake", input="Where?", text_format=City, max_output_tokens=30)
        assert parsed.output_parsed == City(city="Rome") and "city" in engine.params[-1].json_schema
        with pytest.raises(openai.NotFoundError, match="the whole conversation"):
            create(input="Hi", previous_response_id="resp_1")
        second = create(input="And now?", previous_response_id=create(input="Rome?").id)
        assert engine.prompts[-1].endswith(f"<user>Rome?<assistant>{second.output_text}<user>And now?<assistant>")
        failed = list(create(input="FAIL", stream=True))[-1]
        assert failed.type == "response.failed" and "not finite" in failed.response.error.message
        engine.reply = REPLY
        stream = create(input="HANG", stream=True)
        next(stream)
        assert engine.running
        stream.close()
        wait_until(lambda: not engine.running)


@pytest.mark.parametrize("kind", ["text", "json_object"])
def test_a_schema_of_any_depth_without_effect_is_not_repeated(call, kind):
    statuses = set()
    for depth in range(950, 1000):  # some can be read and cannot be written
        schema = '{"a": ' * depth + "{}" + "}" * depth
        body = f'{{"input": "Hi", "text": {{"format": {{"type": "{kind}", "schema": {schema}, "name": "x"}}}}}}'
        answer = call("POST", URL, content=body, headers={"Content-Type": "application/json"})
        statuses.add(answer.status_code)
        assert answer.status_code == 400 or answer.json()["text"]["format"] == {"type": kind}
    assert statuses == {200, 400}


def test_fields_of_other_servers_have_no_effect(respond):
    given = {"max_tool_calls": 3, "safety_identifier": "me", "prompt_cache_key": "k", "top_logprobs": 0}
    answer = respond(REPLY, input="Hi", verbosity="low", text={"verbosity": "low"}, service_tier="flex", **given).json()
    assert {name: answer[name] for name in given} == given
    assert (answer["text"]["verbosity"], answer["service_tier"]) == ("low", "default")
