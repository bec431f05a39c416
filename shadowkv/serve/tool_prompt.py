"""What a chat template is given; one without support for tools gets them in words, as in llama.cpp."""

from __future__ import annotations

import json
from typing import Any

from shadowkv.serve.messages import Conversation, Turn

EXPLANATION = (
    "You can call tools. To do so, answer with nothing but a JSON list of the calls, each of which is an object with "
    '"name" and "parameters". These are the tools:'
)


def template_input(conversation: Conversation, template: str | None) -> tuple[list[Turn], dict[str, Any]]:
    """Messages, and the other variables, for a chat template (Jinja source)."""
    turns, tools = _with_names(conversation.messages or []), conversation.tools
    if "tool" in (template or ""):
        return turns, {"tools": tools or None, **conversation.template_variables}
    return in_words(turns, tools), conversation.template_variables


def in_words(turns: list[Turn], tools: list[dict[str, Any]]) -> list[Turn]:
    """Messages without tools: they are explained in the system message; calls become the text of an answer with calls
    (``tools.calls_schema``), and their results become the user's."""
    turns = [_in_words(turn) for turn in turns]
    if not tools:
        return turns
    functions = [_json(tool["function"]) for tool in tools]
    text = "\n".join((EXPLANATION, *functions))
    if turns and turns[0]["role"] == "system":
        return [{**turns[0], "content": f"{turns[0]['content']}\n\n{text}"}, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]


def _with_names(turns: list[Turn]) -> list[Turn]:
    """Messages whose tool results have the name of the called tool, which some templates require."""
    names = {call["id"]: call["function"]["name"] for turn in turns for call in turn.get("tool_calls", ())}
    return [
        {"name": names[turn["tool_call_id"]], **turn} if turn.get("tool_call_id") in names else turn for turn in turns
    ]


def _in_words(turn: Turn) -> Turn:
    if turn["role"] == "tool":
        response = {"name": turn.get("name"), "content": turn["content"]}
        return {"role": "user", "content": _json({"tool_response": response})}
    if "tool_calls" not in turn:
        return turn
    functions = [call["function"] for call in turn["tool_calls"]]
    calls = _json([{"name": one["name"], "parameters": one["arguments"]} for one in functions])
    return {"role": "assistant", "content": f"{turn['content']}\n{calls}".strip()}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
