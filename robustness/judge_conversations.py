"""The fuzzer's judge for ``/v1/responses`` and ``/v1/messages``: bodies that are nonsense, answers ill-formed.

Written from the two APIs' documents, as ``judge.py`` is from those of chats, and as lenient: finding contradictions is
left to the server.
"""

from __future__ import annotations

import json
from typing import Any

import httpx

from robustness.judge_rules import Rule, boolean, either, fields, integer, json_object, schema, short, some, text, utf8

MESSAGES = "/v1/messages"
ENDS = ("end_turn", "max_tokens", "stop_sequence", "tool_use")


def one_of(*values: Any) -> Rule:
    return lambda value: value in values


def anything(value: Any) -> bool:
    return True


def responses_body(sampling: dict[str, Rule]) -> Rule:
    """Body of ``/v1/responses``."""
    part = fields({"type": one_of("input_text", "output_text", "text"), "text": utf8, "annotations": anything}, "text")
    said = either(utf8, some(part))
    item = either(
        fields(
            {"type": one_of("message"), "role": text, "content": said, "id": text, "status": text}, "role", "content"
        ),
        fields(
            {"type": one_of("function_call"), "call_id": short(256), "name": short(256), "arguments": json_object},
            *("type", "call_id", "name", "arguments"),
        ),
        fields({"type": one_of("function_call_output"), "call_id": short(256), "output": said}, "call_id", "output"),
        fields({"type": one_of("reasoning"), "content": anything, "summary": anything}, "type"),
    )
    tool = fields({"type": one_of("function"), "name": short(256, least=1), "parameters": schema}, "type", "name")
    return fields(
        {
            **sampling,
            "input": either(utf8, some(item, 1)),
            "instructions": utf8,
            "max_output_tokens": integer(1),
            "stop": anything,
            "text": lambda value: isinstance(value, dict),
            "tools": some(tool),
            "tool_choice": either(one_of("none", "auto", "required"), lambda value: isinstance(value, dict)),
            "parallel_tool_calls": boolean,
            "reasoning": lambda value: isinstance(value, dict),
            "metadata": lambda value: isinstance(value, dict) and len(value) <= 16,
            "include": some(text),
            "previous_response_id": lambda value: False,
        },
        "input",
    )


def prompt_rules() -> dict[str, Rule]:
    """Rules for both routes of ``/v1/messages``."""
    part = fields({"type": one_of("text"), "text": utf8, "citations": anything}, "type", "text")
    block = either(
        part,
        fields(
            {"type": one_of("tool_use"), "input": lambda value: isinstance(value, dict)}, "type", "id", "name", "input"
        ),
        fields({"type": one_of("tool_result"), "content": either(utf8, some(part))}, "type", "tool_use_id"),
        fields({"type": one_of("thinking"), "thinking": utf8}, "type", "thinking"),
        fields({"type": one_of("redacted_thinking"), "data": utf8}, "type", "data"),
    )
    message = fields({"role": one_of("user", "assistant"), "content": either(utf8, some(block))}, "role", "content")
    tool = fields(
        {"name": short(256, least=1), "input_schema": schema, "type": one_of("custom")}, "name", "input_schema"
    )
    return {
        "messages": some(message, 1),
        "system": either(utf8, some(part)),
        "tools": some(tool),
        "tool_choice": lambda value: isinstance(value, dict) and value.get("type") in ("auto", "any", "tool", "none"),
        "thinking": lambda value: isinstance(value, dict),
        "output_config": lambda value: isinstance(value, dict),
        "chat_template_kwargs": lambda value: isinstance(value, dict),
    }


def messages_body(sampling: dict[str, Rule]) -> Rule:
    """Body of ``/v1/messages``."""
    stops = some(short(1024, least=1), most=64)
    rules = {**sampling, **prompt_rules(), "max_tokens": integer(1), "stop_sequences": stops}
    return fields(rules, "messages", "max_tokens")


def ill_formed(path: str, body: dict[str, Any], response: httpx.Response) -> str | None:
    """What is wrong with the form of an answer of these routes, if anything; may raise ValueError or KeyError, too."""
    if response.status_code != 200:
        return _error(path, response)
    if path.endswith("/count_tokens"):
        return None if integer(1)(response.json()["input_tokens"]) else "no count"
    if not body.get("stream"):
        return _whole(path, response.json())
    events = _events(response.text)
    if path == MESSAGES:
        if events[-1]["type"] == "error":
            return None if events[-1]["error"]["type"] == "overloaded_error" else f"a stream that failed: {events[-1]}"
        fine = events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
        return None if fine and events[-2]["delta"]["stop_reason"] in ENDS else "a stream without its ends"
    if [event["sequence_number"] for event in events] != [*range(len(events))]:
        return "events that are not counted"
    return (
        _whole(path, events[-1]["response"])
        if events[0]["type"] == "response.created"
        else "a stream without its start"
    )


def _whole(path: str, answer: dict[str, Any]) -> str | None:
    if path == MESSAGES:
        return None if answer["type"] == "message" and answer["stop_reason"] in ENDS else "no message"
    fine = answer["object"] == "response" and answer["status"] in ("completed", "incomplete") and answer["output"]
    usage = answer["usage"]
    return None if fine and usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"] else "no response"


def _error(path: str, response: httpx.Response) -> str | None:
    error = response.json()["error"]
    wanted = {"type", "message"} if path.startswith(MESSAGES) else {"type", "message", "param", "code"}
    if set(error) != wanted or not error["message"]:
        return "an error of another shape"
    full = response.status_code == 503 and "retry-after" in response.headers
    return f"{response.status_code}: {error['message']}" if response.status_code >= 500 and not full else None


def _events(content: str) -> list[Any]:
    found = [event.split("\n") for event in content.split("\n\n") if event and not event.startswith(":")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in found]
    if [name.removeprefix("event: ") for name, _ in found] != [event["type"] for event in events]:
        raise ValueError("events with other names than their types")
    return [event for event in events if event["type"] != "ping"]
