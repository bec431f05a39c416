"""gpt-oss's answers: messages in text that is cut at every place, through the server, and in later prompts."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine
from replies import events
from test_serve_tools import TOOLS, together
from tokenizers import AddedToken

from shadowkv.models.tokenization.chat_template import ChatTemplate
from shadowkv.models.tokenization.tokenizer import Tokenizer
from shadowkv.models.tokenization.tokenizer_files import byte_tokenizer
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.openai.messages import template_input
from shadowkv.serve.openai.protocol import ChatRequest
from shadowkv.serve.text.harmony import FINAL, Harmony, HarmonyReasoning, opening

PROMPT = "<|start|>assistant"
TEMPLATE = """
{%- for tool in tools or [] %}
{{- "// " + tool.function.description + "\\ntype " + tool.function.name + "\\n" }}
{%- endfor %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
{%- if message.role == "tool" %}
{%- if last.name is none %}{{ raise_exception("no call before") }}{% endif %}
{{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" }}
{{- message.content|tojson }}<|end|>
{%- elif message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception("content and thinking") }}{% endif %}
{%- if message.thinking %}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{%- set last.name = call.name %}
{{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
{{- call.arguments|tojson }}<|call|>
{%- elif message.role == "assistant" %}
{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
{%- else %}
{{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
"""In the shape of gpt-oss's: what it reads of messages, and what it refuses."""


def thought(text):
    return f"<|channel|>analysis<|message|>{text}<|end|>"


def call(name, arguments, channel="commentary"):
    return f"<|channel|>{channel} to=functions.{name} <|constrain|>json<|message|>{arguments}"


HM, SAID = thought("Hm, 5 < 6?\n"), "<|channel|>final<|message|>Paris."
ROME = '{"city": "Röme", "deep": [{"a": "<|b|>"}]}'
CASES = [
    ("", HM + PROMPT + SAID, "Hm, 5 < 6?", "Paris.", []),
    ("", HM + thought("Now.") + PROMPT + SAID, "Hm, 5 < 6?\nNow.", "Paris.", []),
    ("", SAID, "", "Paris.", []),
    ("", "Paris, to=all.", "", "Paris, to=all.", []),
    ("", " to=all, he said", "", " to=all, he said", []),
    ("", HM + PROMPT + call("weather", ROME), "Hm, 5 < 6?", "", [("weather", ROME)]),
    ("", HM + PROMPT + call("stop", "{}", "analysis") + "<|call|>", "Hm, 5 < 6?", "", [("stop", "{}")]),
    ("", " to=functions.stop<|channel|>commentary json<|message|>{}", "", "", [("stop", "{}")]),
    (
        "",
        f"<|channel|>commentary<|message|>I look. <|end|>{PROMPT}{call('weather', ROME)}<|call|>"
        f"{PROMPT}{call('stop', '{}')}<|end|>{PROMPT}{SAID}",
        "",
        "I look.\nParis.",
        [("weather", ROME), ("stop", "{}")],
    ),
    ("", "<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "1 + 1", "", []),
    ("", "<|channel|>commentary to=python<|message|>1 + 1", "", "1 + 1", []),
    ("", "<|channel|>analysis<|message|>For ever ", "For ever ", "", []),
    ("", f"<|channel|>analysis<|message|>No end{PROMPT}{SAID}", "No end", "Paris.", []),
    ("", call("weather", '{"city": "Ro'), "", "", [("weather", '{"city": "Ro')]),
    ("", call("weather", ""), "", "", [("weather", "")]),
    ("", HM + PROMPT + "<|channel|>fin", "Hm, 5 < 6?", "", []),
    ("<|channel|>analysis<|message|>", f"Hm.<|end|>{PROMPT}{SAID}", "Hm.", "Paris.", []),
    (f"{SAID} It", " is.", "", " is.", []),
    ("", "", "", "", []),
]


def read(prompt, pieces, tools=TOOLS):
    """Thoughts, text and calls, as a chat reads them."""
    reasoning, parser = HarmonyReasoning(PROMPT + prompt), Harmony(tools=tools)
    thoughts, said, calls = "", "", []
    for number, piece in enumerate(pieces):
        last = number == len(pieces) - 1
        new, rest = reasoning.push(piece, last)
        text, parts = parser.push(rest, last)
        thoughts, said = thoughts + new, said + text
        for part in parts:
            if part.name is not None:
                calls.append((part.name, ""))
            calls[part.index] = (calls[part.index][0], calls[part.index][1] + part.arguments)
    return thoughts, said, calls


@pytest.mark.parametrize("prompt, text, thoughts, said, calls", CASES)
def test_whole_and_in_two_pieces_and_character_by_character(prompt, text, thoughts, said, calls):
    assert read(prompt, [text]) == (thoughts, said, calls)
    for place in range(len(text) + 1):
        assert read(prompt, [text[:place], text[place:]]) == (thoughts, said, calls), place
    assert read(prompt, [*text, ""]) == (thoughts, said, calls)


def test_without_tools_a_call_is_text():
    assert read("", [HM + PROMPT + call("weather", ROME)], tools=()) == ("Hm, 5 < 6?", ROME, [])


@pytest.fixture
def ask(client_of):
    """A chat with gpt-oss, whose answer is given; its ``engine`` is at hand."""
    engine = FakeEngine()
    engine.max_model_len = 4000
    engine.tokenizer.chat_template = TEMPLATE
    client = client_of(engine)

    def send(reply, url="/v1/chat/completions", **body):
        engine.reply = reply
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": len(reply)}
        return client.post(url, **({"input": "Hi"} if "responses" in url else chat), **body)

    send.engine = engine
    return send


def test_thoughts_and_calls_whole_and_streamed_without_a_flag(ask):
    reply = f"{HM}{PROMPT}<|channel|>commentary<|message|>I look.<|end|>{PROMPT}{call('weather', ROME)}"
    choice = ask(reply, tools=TOOLS).json()["choices"][0]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, 5 < 6?", "I look.")
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": ROME}
    assert choice["finish_reason"] == "tool_calls"
    chunks = events(ask(reply, tools=TOOLS, stream=True))
    content, (streamed,), reason = together(chunks)
    assert (content, streamed["arguments"], reason) == ("I look.", ROME, "tool_calls")
    assert streamed["pieces"] > 10
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, 5 < 6?"


@pytest.mark.parametrize("body", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_answers_without_calls_are_read_too(ask, body):
    message = ask(HM + PROMPT + SAID, **body).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Paris.", *["Hm, 5 < 6?"] * 2)
    assert "tool_calls" not in message
    assert ask.engine.params[-1].skip_special_tokens is False


def test_responses_have_thoughts_and_calls_as_items(ask):
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    answer = ask(HM + PROMPT + call("weather", ROME), "/v1/responses", tools=tools).json()
    assert [item["type"] for item in answer["output"]] == ["reasoning", "function_call"]
    assert answer["output"][1]["arguments"] == ROME


def test_what_follows_a_schema_begins_behind_the_header_of_an_answer(ask):
    message = ask('{"a": 1}', response_format={"type": "json_object"}).json()["choices"][0]["message"]
    assert message["content"] == '{"a": 1}' and ask.engine.prompts[-1].endswith(f"<assistant>{FINAL}")
    choice = ask('[{"name": "stop", "parameters": {}}]', tools=TOOLS, tool_choice="required").json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "stop", "arguments": "{}"}
    assert ask.engine.prompts[-1].endswith(f"<assistant>{FINAL}") and ask.engine.params[-1].skip_special_tokens
    ask(SAID)
    assert not ask.engine.prompts[-1].endswith(FINAL)
    assert opening(f"{PROMPT}{FINAL}") == "", "a template that writes it itself"


def earlier_call(number, name="weather"):
    function = {"name": name, "arguments": f'{{"city": "{number}"}}'}
    return {"id": f"call_{number}", "type": "function", "function": function}


def rendered(messages, tools=()):
    request = ChatRequest(messages=messages, tools=list(tools))
    turns, variables = template_input(request, TEMPLATE)
    return ChatTemplate(TEMPLATE).render(turns, add_generation_prompt=True, **variables)


def test_earlier_thoughts_and_calls_go_back_in_the_templates_words():
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [earlier_call(1)]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "assistant", "content": "Sunny.", "reasoning_content": "So."},
    ]
    assert rendered(turns) == (
        "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.\nI look.<|end|>"
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "1"}<|call|>'
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"sunny"<|end|>'
        "<|start|>assistant<|channel|>final<|message|>Sunny.<|end|><|start|>assistant"
    )
    request = ChatRequest(messages=turns, tools=[])
    assert template_input(request, TEMPLATE)[0][-1] == {"role": "assistant", "content": "Sunny.", "thinking": "So."}


def test_calls_of_one_message_become_messages_with_their_results():
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "reasoning_content": "Both.", "tool_calls": [earlier_call(1), earlier_call(2, "stop")]},
        {"role": "tool", "tool_call_id": "call_2", "content": "two"},
        {"role": "tool", "tool_call_id": "call_1", "content": "one"},
    ]
    text = rendered(turns)
    order = [
        "Both.",
        "to=functions.weather",
        "functions.weather to",
        '"one"',
        "to=functions.stop",
        "functions.stop to",
        '"two"',
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places) and text.count("Both.") == 1


def test_a_tool_without_a_description():
    assert rendered([{"role": "user", "content": "Hi"}], TOOLS).startswith("// Today's\ntype weather\n// \ntype stop\n")


def test_both_tokens_end_an_answer():
    def ends(*texts):
        backend = byte_tokenizer(300, [256]).backend
        backend.add_special_tokens([AddedToken(text, special=True) for text in texts])
        made = Tokenizer(backend, special_tokens={}, eos_token_ids=[256])
        return made.eos_token_ids - {256}, {backend.token_to_id(text) for text in texts}

    found, both = ends("<|call|>", "<|return|>")
    assert found == both and len(both) == 2
    assert ends("<|call|>")[0] == set()


@pytest.mark.parametrize("flags", [{"tool_call_parser": "openai"}, {"reasoning_parser": "openai_gptoss"}])
def test_either_flag_stands_for_the_format(flags):
    known = ServerSettings(**flags).tool_format(None)
    assert known.parser is Harmony and known.reasoning is HarmonyReasoning


def test_flags_of_two_formats_are_refused():
    with pytest.raises(ValueError, match="'hermes' does not go with reasoning_parser='openai_gptoss'"):
        ServerSettings(tool_call_parser="hermes", reasoning_parser="openai_gptoss")
    with pytest.raises(ValueError, match="'openai' does not go with reasoning_parser='qwen3'"):
        ServerSettings(tool_call_parser="openai", reasoning_parser="qwen3")
    ServerSettings(tool_call_parser="openai", reasoning_parser="openai_gptoss").check_template(TEMPLATE)
    with pytest.raises(ValueError, match=r"--reasoning-parser qwen3: .* pass openai_gptoss"):
        ServerSettings(reasoning_parser="qwen3").check_template(TEMPLATE)
