"""Thoughts, apart from the answer: in text that is cut at every place, and in chats."""

from __future__ import annotations

import pytest
from replies import events
from test_serve_errors import error_of
from test_serve_tools import ROME, TEXT, TOOLS

from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.text.gemma4 import Gemma4Reasoning
from shadowkv.serve.text.reasoning import ReasoningParser
from shadowkv.serve.text.tool_formats import FORMATS

CASES = [
    (ReasoningParser, "", "<think>\nLet me see.\n</think>\n\nParis.\n", "Let me see.", "Paris.\n"),
    (ReasoningParser, "<assistant><think>\n", "Let me see. </think>Paris.", "Let me see.", "Paris."),
    (ReasoningParser, "<assistant><think>", "<think>Let me </thin</think>", "Let me </thin", ""),
    (ReasoningParser, "<think>\n\n</think>\n\n", " Paris <think> London", "", " Paris <think> London"),
    (ReasoningParser, "<|assistant|>\n<think></think>", "\nParis.", "", "Paris."),
    (ReasoningParser, "", "<think> For ever ", "For ever ", ""),
    (ReasoningParser, "", "", "", ""),
    (Gemma4Reasoning, "<|turn>model\n", "<|channel>thought\nLet me see.\n<channel|>Paris.", "Let me see.", "Paris."),
    (Gemma4Reasoning, "<|turn>model\n", "Paris.", "", "Paris."),
    (Gemma4Reasoning, "<|turn>model\n<|channel>thought\n<channel|>", "Paris.", "", "Paris."),
    (Gemma4Reasoning, "<|turn>model\n", "<|channel>thought\nFor ever", "For ever", ""),
    (Gemma4Reasoning, "", "<|channel>thought\nHm.<channel|><|tool_call>call:f{}", "Hm.", "<|tool_call>call:f{}"),
]


@pytest.mark.parametrize("kind, prompt, text, thought, said", CASES)
def test_text_in_pieces(kind, prompt, text, thought, said):
    for pieces in ([text], *([text[:place], text[place:]] for place in range(len(text))), [*text, ""]):
        parser = kind(prompt)
        found = [parser.push(piece, number == len(pieces) - 1) for number, piece in enumerate(pieces)]
        assert tuple(map("".join, zip(*found, strict=True))) == (thought, said), pieces


def test_gemma4s_reasoning_and_calls_are_one_format():
    settings = ServerSettings(reasoning_parser="gemma4")
    assert settings.tool_format("a template without tools") is FORMATS["gemma4"]
    assert ServerSettings(tool_call_parser="gemma4").tool_format(None).reasoning is Gemma4Reasoning
    ServerSettings(tool_call_parser="gemma4", reasoning_parser="gemma4").check_template("<|tool_call>")
    for calls, thoughts in (("hermes", "gemma4"), ("gemma4", "qwen3"), ("openai", "gemma4")):
        with pytest.raises(
            ValueError, match=f"{calls!r} does not go with reasoning_parser={thoughts!r}: .* only with each other"
        ):
            ServerSettings(tool_call_parser=calls, reasoning_parser=thoughts)
    with pytest.raises(ValueError, match=r"--reasoning-parser qwen3: .* pass gemma4"):
        ServerSettings(reasoning_parser="qwen3").check_template("<|tool_call>")


@pytest.fixture
def ask(ask):
    """A chat."""

    def send(reply, **body):
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": len(reply), **body}
        return ask_chat("/v1/chat/completions", reply, **body)

    ask_chat, send.engine = ask, ask.engine
    return send


def test_an_answer_and_a_call_behind_thoughts(ask):
    for reply, content in (("<think>Hm.</think>Paris.", "Paris."), (f"<think>Hm.</think>{TEXT}", "Let me look.")):
        choice = ask(reply, tools=TOOLS).json()["choices"][0]
        assert choice["message"]["reasoning_content"] == "Hm." and choice["message"]["content"] == content
        deltas = [chunk["choices"][0]["delta"] for chunk in events(ask(reply, tools=TOOLS, stream=True))]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
        assert "".join(delta.get("content", "") for delta in deltas) == content
    assert choice["message"]["tool_calls"][0]["function"] == ROME and choice["finish_reason"] == "tool_calls"


def test_output_that_follows_a_schema_has_no_thoughts(ask):
    reply = "<think>Hm.</think>"
    message = ask(reply, response_format={"type": "json_object"}).json()["choices"][0]["message"]
    assert message["content"] == reply and message["reasoning"] is None and "reasoning_content" not in message
    assert "reasoning_content" not in ask(reply, tools=TOOLS, tool_choice="required").text


def test_thoughts_are_sent_back_to_the_template(ask):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "reasoning_content": "Hm."}]
    assert ask("x", messages=turns).is_success
    assert ask.engine.tokenizer.rendered[0] == turns
    turns[0]["reasoning_content"] = "no"
    assert error_of(ask("x", messages=turns))["param"] == "messages[0].reasoning_content"


def test_an_unknown_parser():
    with pytest.raises(ValueError, match="reasoning_parser='x' is not one of deepseek_r1, qwen3, glm45"):
        ServerSettings(reasoning_parser="x")


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_thoughts_are_counted(ask, stream):
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = ask("<think>So.</think>Yes", include_reasoning=False, **options)
    usage = (events(answer)[-1] if stream else answer.json())["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len("So.</think")}
