"""Open Responses' compliance cases (openresponses.org, specification of 2026-04-24): those over HTTP, written anew.
Each response has the fields that are documented, which are those that Open Responses requires, and each response and
event is valid for OpenAI's client. Images are refused: that case fails."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import REPLY, FakeTokenizer
from openai.types import responses as of_client
from pydantic import TypeAdapter
from replies import named_events
from test_serve_errors import error_of

from shadowkv.serve.responses.answers import Response

EVENT: TypeAdapter[Any] = TypeAdapter(of_client.ResponseStreamEvent)
URL = "/v1/responses"


def said(text, role="user", **more):
    return {"type": "message", "role": role, "content": text, **more}


WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}
ASKED = {"input": [said("What's the weather like in San Francisco?")], "tools": [WEATHER]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "San Francisco, CA"}}\n</tool_call>'
CASES = {
    "basic text": (REPLY, {"input": [said("Say hello in exactly 3 words.")]}),
    "phases": (
        REPLY,
        {
            "input": [
                said("I should answer with the saved number.", "assistant", phase="commentary"),
                said("The number is four.", "assistant", phase="final_answer"),
                said("Repeat only the number."),
            ]
        },
    ),
    "streaming": (REPLY, {"input": [said("Count from 1 to 5.")], "stream": True}),
    "system prompt": (REPLY, {"input": [said("You are a pirate.", "system"), said("Say hello.")]}),
    "tool calling": (CALL, ASKED),
    "tool calling, streaming": (CALL, {**ASKED, "stream": True}),
    "several turns": (
        REPLY,
        {"input": [said("My name is Alice."), said("Hello Alice!", "assistant"), said("What is my name?")]},
    ),
}


def check(response):
    Response.model_validate(response, strict=True)
    of_client.Response.model_validate(response, strict=True)


def check_events(events):
    for event in events:
        EVENT.validate_python(event, strict=True)
        if "response" in event:
            check(event["response"])


@pytest.fixture
def respond(ask, monkeypatch):
    def rendered(self, messages, *_, **__):
        return "".join(message["content"] for message in messages)

    # The stand-in for a template refuses a conversation without a user's beginning; the suite has one.
    monkeypatch.setattr(FakeTokenizer, "apply_chat_template", rendered)
    return lambda reply, body: ask(URL, reply, max_output_tokens=200, **body)


@pytest.mark.parametrize("case", CASES)
def test_a_case(respond, case):
    reply, body = CASES[case]
    answer = respond(reply, body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        response = answer.json()
    else:
        events = named_events(answer)
        check_events(events)
        types = [event["type"] for event in events]
        if "tools" in body:
            items = [event["item"]["type"] for event in events if event["type"].startswith("response.output_item.")]
            assert items == ["function_call"] * 2
            assert {*types} >= {f"response.function_call_arguments.{kind}" for kind in ("delta", "done")}
        response = events[-1]["response"]
        assert types[-1] == "response.completed"
    check(response)
    kinds = [item["type"] for item in response["output"]]
    assert response["status"] == "completed" and kinds == ["function_call" if "tools" in body else "message"]


def test_images_are_refused(respond):
    image = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
    answer = respond(REPLY, {"input": [said([{"type": "input_text", "text": "What is it?"}, image])]})
    assert "images" in error_of(answer, 400)["message"]


@pytest.mark.parametrize(
    "body, status", [({"input": "Hi" * 4, "max_output_tokens": 3}, "incomplete"), ({"input": "FAIL"}, "failed")]
)
def test_streams_that_end_otherwise_are_valid_too(ask, body, status):
    events = named_events(ask(URL, REPLY, stream=True, **{"max_output_tokens": 200, **body}))
    check_events(events)
    assert events[-1]["type"] == f"response.{status}" and events[-1]["response"]["status"] == status


def test_the_check_can_fail(respond):
    response = respond(REPLY, {"input": "Hi"}).json()
    for name in ("presence_penalty", "max_tool_calls", "service_tier", "prompt_cache_key"):
        with pytest.raises(ValueError, match=name):
            check({key: value for key, value in response.items() if key != name})
    with pytest.raises(ValueError, match="delta"):
        check_events([{"type": "response.output_text.delta", "sequence_number": 1}])
