"""Tools of /v1/chat/completions: what the template sees, how calls are answered, and every refusal."""

from __future__ import annotations

import json

import pytest
from fake_engine import REPLY, FakeEngine
from replies import events
from test_serve_errors import error_of

from shadowkv.engine.structured.grammar import Grammars
from shadowkv.models.tokenization.tokenizer_files import byte_tokenizer
from shadowkv.serve.bodies import limits
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.openai.output_schema import calls_schema
from shadowkv.serve.openai.tools import Choice
from tests.grammar_answers import accepts, begun

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Today's",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
STOP = {"type": "function", "function": {"name": "stop", "strict": True}}
TOOLS = [WEATHER, STOP]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
TURNS = [
    {"role": "user", "content": "Rome?"},
    {"role": "assistant", "content": None, "tool_calls": [{"index": 0, **CALL}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]
TEXT = 'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
TWO = TEXT + '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
LIST = '[{"name": "weather", "parameters": {"city": "Rome"}}]'
ROME = {"name": "weather", "arguments": '{"city": "Rome"}'}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture
def engine():
    """With room for tools that are explained in the prompt."""
    engine = FakeEngine()
    engine.max_model_len = 2000
    return engine


@pytest.fixture
def hermes(engine):
    """The template says how calls are written."""
    engine.tokenizer.chat_template = "{{ tools }}<tool_call></tool_call>"
    return engine


def together(chunks):
    """Message and finish reason of a stream's only choice, put together as clients do."""
    content, calls, reason = "", [], None
    for choice in (chunk["choices"][0] for chunk in chunks):
        delta, reason = choice["delta"], choice["finish_reason"] or reason
        content += delta.get("content") or ""
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(calls) and part["type"] == "function" and "name" in part["function"]
                calls.append({**part["function"], "pieces": 0})
            else:
                calls[part["index"]]["arguments"] += part["function"]["arguments"]
                calls[part["index"]]["pieces"] += 1
    return content, calls, reason


@pytest.mark.parametrize(
    "text, choice, content, calls",
    [
        (TEXT, None, "Let me look.", [ROME]),
        (TWO, "auto", "Let me look.", [ROME, {"name": "stop", "arguments": "{}"}]),
        (REPLY, "auto", REPLY, []),
        (TEXT, "none", TEXT, []),
        (LIST, "required", None, [ROME]),
        ('{"city": "Rome"}', NAMED, None, [ROME]),
    ],
)
def test_calls_whole_and_streamed(hermes, post, text, choice, content, calls):
    hermes.reply = text
    asked = {"tools": TOOLS, "tool_choice": choice, "max_tokens": len(text)}
    whole = post("chat", **asked).json()["choices"][0]
    found = whole["message"].pop("tool_calls", [])
    assert [call["function"] for call in found] == calls and whole["message"]["content"] == content
    assert all(call["type"] == "function" and call["id"].startswith("chatcmpl-tool-") for call in found)
    assert whole["finish_reason"] == ("tool_calls" if calls else "stop")
    said, streamed, reason = together(events(post("chat", stream=True, **asked)))
    assert (said or None, reason) == (content, whole["finish_reason"])
    assert [{"name": call["name"], "arguments": call["arguments"]} for call in streamed] == calls
    assert all(call["pieces"] > 1 for call in streamed if len(call["arguments"]) > 2)


def test_one_call_where_calls_may_not_be_parallel(hermes, post):
    hermes.reply = TWO
    for stream in (False, True):
        answer = post("chat", tools=TOOLS, parallel_tool_calls=False, max_tokens=len(TWO), stream=stream)
        if stream:
            calls = together(events(answer))[1]
        else:
            calls = answer.json()["choices"][0]["message"]["tool_calls"]
        assert len(calls) == 1


def test_a_call_that_is_cut_off_is_none(hermes, post):
    hermes.reply = TEXT
    choice = post("chat", tools=TOOLS, max_tokens=TEXT.index("Rome")).json()["choices"][0]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]


def test_a_call_before_one_that_is_cut_off_is_one(hermes, post):
    hermes.reply = TEXT + TEXT
    choice = post("chat", tools=TOOLS, max_tokens=len(TEXT) + TEXT.index("Rome")).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length" and json.loads(call["function"]["arguments"]) == {"city": "Rome"}


def test_choices_have_calls_of_their_own(hermes, post):
    hermes.reply = TEXT
    choices = post("chat", tools=TOOLS, n=3, max_tokens=len(TEXT)).json()["choices"]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3


def test_what_a_template_sees_that_knows_tools(hermes, post, engine):
    assert post(
        "chat", messages=TURNS, tools=TOOLS, tool_choice="none", chat_template_kwargs={"think": False}
    ).is_success
    messages, variables = engine.tokenizer.rendered
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    assert messages == [
        TURNS[0],
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": function}]},
        {**TURNS[2], "name": "weather"},
    ]
    stop = {"name": "stop", "parameters": {"type": "object", "properties": {}}}
    assert variables == {"tools": [WEATHER, {"type": "function", "function": stop}], "think": False}


def test_a_template_that_knows_no_tools_gets_them_in_words(post, engine):
    for first in ([], [{"role": "system", "content": "Be brief."}]):
        assert post("chat", messages=[*first, *TURNS], tools=TOOLS, tool_choice="required", max_tokens=1).is_success
        (system, *turns), variables = engine.tokenizer.rendered
        assert system["role"] == "system" and not variables
        assert system["content"].startswith("Be brief.\n\nYou can call" if first else "You can call")
        assert [json.loads(line)["name"] for line in system["content"].splitlines()[-2:]] == ["weather", "stop"]
        assert turns == [
            TURNS[0],
            {"role": "assistant", "content": LIST},
            {"role": "user", "content": '{"tool_response": {"name": "weather", "content": "sunny"}}'},
        ]
    assert post("chat").is_success
    assert engine.tokenizer.rendered == ([{"role": "user", "content": "Hi"}], {})


def test_tokenize_and_save_see_the_same(hermes, call, engine):
    body = {"messages": TURNS, "tools": TOOLS, "chat_template_kwargs": {"think": True}}
    assert call("POST", "/tokenize", json=body).is_success
    seen = engine.tokenizer.rendered
    assert call("POST", "/cache/save", json={"name": "a", **body}).is_success
    assert engine.tokenizer.rendered == seen and seen[1]["think"] is True and len(seen[1]["tools"]) == 2


def test_special_tokens_are_part_of_the_text_only_where_calls_are_read(hermes, post):
    post("chat", tools=TOOLS)
    post("chat", tools=TOOLS, tool_choice="required")
    post("chat")
    assert [params.skip_special_tokens for params in hermes.params] == [False, True, True]


@pytest.fixture(scope="module")
def follows():
    """Whether a value can be generated under a schema, a byte a token."""
    grammars = Grammars(byte_tokenizer(300, [256]), 300, frozenset([256]))

    def check(value, schema):
        constraint = begun(grammars, schema, one_line=True)
        return all(accepts(constraint, token) for token in [*json.dumps(value).encode(), 256])

    yield check
    grammars.pool.close()


def test_arguments_are_an_object_whatever_their_schema_says_of_it(post, engine, follows):
    loose = {"type": "function", "function": {"name": "loose", "parameters": {"properties": {"a": {}}}}}
    named = {"type": "function", "function": {"name": "loose"}}
    post("chat", tools=[loose], tool_choice=named)
    schema = engine.params[-1].json_schema
    assert follows({"a": 5}, schema)
    assert not follows(5, schema)


def test_required_and_named_calls_follow_the_parameters(post, engine, follows):
    post("chat", tools=TOOLS, tool_choice="required")
    schema = engine.params[-1].json_schema
    good = [{"name": "weather", "parameters": {"city": "Rome"}}, {"name": "stop", "parameters": {}}]
    assert follows(good, schema)
    for bad in ([], good[0], [{"name": "stop"}], [{"name": "weather", "parameters": {"city": 3}}], [{"name": "x"}]):
        assert not follows(bad, schema), bad
    post("chat", tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    schema = engine.params[-1].json_schema
    assert follows(good[:1], schema) and not follows(good, schema)
    post("chat", tools=TOOLS, tool_choice=NAMED)
    assert json.loads(engine.params[-1].json_schema) == WEATHER["function"]["parameters"]


def test_references_of_each_tool_begin_at_its_own_root(follows):
    def tool(name, leaf):
        node = {"type": "object", "properties": {"leaf": {"$ref": "#/$defs/leaf"}, "next": {"$ref": "#"}}}
        parameters = {**node, "$defs": {"leaf": {"type": leaf}}}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    schema = calls_schema([tool("f", "string"), tool("g", "integer")], Choice("required"), True)
    for name, leaf, fine in (("f", "x", True), ("f", 1, False), ("g", 1, True), ("g", "x", False)):
        assert follows([{"name": name, "parameters": {"next": {"next": {"leaf": leaf}}}}], schema) == fine


def function(**fields):
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


def earlier(**fields):
    return {"messages": [TURNS[0], {"role": "assistant", "tool_calls": [{**CALL, **fields}]}]}


DEEP: dict = {}
for _ in range(limits.MAX_NESTING):
    DEEP = {"a": DEEP}
WRONG = [
    ({"tools": {}}, "tools", "list"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
    (function(name=""), "tools[0].function.name", "1 character"),
    (function(parameters={"type": "string"}), "tools[0].function.parameters", "'object'"),
    (function(parameters=3), "tools[0].function.parameters", "dictionary"),
    (function(parameters=DEEP), "tools", "100 levels"),
    (function(description="x" * limits.MAX_TOOLS_CHARS), "tools", f"{limits.MAX_TOOLS_CHARS}"),
    (function(grammar="x"), "tools[0].function.grammar", "not supported"),
    ({"tools": [WEATHER, WEATHER]}, "tools", "'weather'"),
    ({"tools": [WEATHER] * (limits.MAX_TOOLS + 1)}, "tools", f"{limits.MAX_TOOLS}"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'required'"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "'f'"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "'function'"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format", "'none'"),
    ({"tools": TOOLS, "tool_choice": "required", "min_tokens": 1, "max_tokens": 3}, "tool_choice", "min_tokens"),
    (function(parameters={"title": "EMPTY"}) | {"tool_choice": "required"}, "tools", "cannot be followed"),
    (earlier(function={"name": "f", "arguments": "{"}), "messages[1].tool_calls[0].function.arguments", "JSON text"),
    (earlier(function={"name": "f", "arguments": "[]"}), "messages[1].tool_calls[0].function.arguments", "object"),
    (earlier(type="custom"), "messages[1].tool_calls[0].type", "'function'"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, "messages[0].tool_calls", "assistant"),
    ({"messages": [{"role": "user", "content": "a", "tool_call_id": "a"}]}, "messages[0].tool_call_id", "tool"),
    ({"messages": [{"role": "tool", "tool_call_id": "a"}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content", "required"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "'tools'"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "'self'"),
    ({"chat_template_kwargs": DEEP}, "chat_template_kwargs", "levels"),
]


@pytest.mark.parametrize("body, param, message", WRONG)
def test_refusals_name_the_field_and_what_would_be_right(post, engine, body, param, message):
    error = error_of(post("chat", **body))
    assert error["param"] == param and message in error["message"]
    assert not engine.prompts


def test_tools_are_for_messages(call):
    for url, more in (("/tokenize", {}), ("/cache/save", {"name": "a"})):
        assert error_of(call("POST", url, json={"prompt": "a", "tools": TOOLS, **more}))["param"] == "tools"


def test_the_flag_goes_before_the_template_and_mistrals_ids_are_short(engine, client_of):
    engine.reply = '[TOOL_CALLS][{"name": "stop", "arguments": {}}]'
    send = client_of(engine, tool_call_parser="mistral").post
    answer = send("/v1/chat/completions", messages=TURNS[:1], tools=TOOLS, max_tokens=len(engine.reply))
    (made,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert made["function"]["name"] == "stop" and len(made["id"]) == 9


def test_a_server_that_has_to_read_calls_does_not_start_where_it_cannot():
    with pytest.raises(
        ValueError, match="tool_call_parser='xml' is not one of hermes, qwen3_coder, qwen3_xml, glm45, "
    ):
        ServerSettings(tool_call_parser="xml")
    settings = ServerSettings(enable_auto_tool_choice=True)
    settings.check_template("{{ tools }} <tool_call>")
    settings.check_template("{{ messages }}")  # whose model is told of tools in words
    with pytest.raises(ValueError, match="--tool-call-parser hermes"):
        settings.check_template("{{ messages }} {{ tools }}")
    ServerSettings(enable_auto_tool_choice=True, tool_call_parser="hermes").check_template(None)
