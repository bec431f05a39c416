"""Calls whose values are plain text between tags: whole, cut at every place, and through the server."""

from __future__ import annotations

import json
import time
from functools import partial

import pytest
from fake_engine import FakeEngine
from replies import events
from test_serve_tools import together
from test_tool_formats import read

from shadowkv.serve.text.argument_values import json_value
from shadowkv.serve.text.tagged_calls import Glm45, MinimaxM2, Qwen3Coder

PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "deep": {"type": "boolean"},
        "where": {"type": "object"},
        "list": {"type": "array"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "most": {"type": ["integer", "null"]},
        "unit": {"enum": ["K", "C"]},
        "place": {"$ref": "#/$defs/place"},
        "any": {},
    },
    "$defs": {"place": {"oneOf": [{"type": "object"}, {"$ref": "#/$defs/place"}]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}},
]
CODE = 'if a < b:\n\n    print("é\\n</parameter>")\n'
TAGS = "a</parameter> b </function>\n</function> <parameter=count=1> </tool_call> d"
NESTED = '{"a": [{"b": "}</parameter>"}],\n "c": {"d": 1.50}}'


def qwen(name, *arguments):
    """A call as Qwen3-Coder writes it."""
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


def glm(name, *arguments, line="\n"):
    """A call as GLM-4.5 writes it; GLM-4.7 has no ``line``."""
    pairs = (f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}" for key, value in arguments)
    return f"<tool_call>{name}{line}{''.join(pairs)}</tool_call>"


def minimax(*calls):
    """Calls as MiniMax-M2 writes them: each a name and arguments."""
    lines = []
    for name, *arguments in calls:
        given = [f'<parameter name="{key}">{value}</parameter>' for key, value in arguments]
        lines += [f'<invoke name="{name}">', *given, "</invoke>"]
    return "\n".join(["<minimax:tool_call>", *lines, "</minimax:tool_call>"])


EVERY = [
    ("text", "12"),
    ("count", "12"),
    ("share", "0.5"),
    ("deep", "True"),
    ("where", NESTED),
    ("list", "['a', None]"),
] + [("maybe", "None"), ("most", "null"), ("unit", "K"), ("place", "{}")]
EVERY_JSON = (
    f'{{"text": "12", "count": 12, "share": 0.5, "deep": true, "where": {NESTED}, "list": ["a", null], '
    '"maybe": null, "most": null, "unit": "K", "place": {}}'
)


def strings(name, **values):
    return (name, json.dumps(values, ensure_ascii=False))


QWEN = [
    ("Just text.\n", "Just text.\n", []),
    (qwen("f", ("text", "Rome")), "", [strings("f", text="Rome")]),
    (f"So:\n{qwen('g')}\n{qwen('f', ('count', '7'))} Done.", "So:Done.", [("g", "{}"), ("f", '{"count": 7}')]),
    (qwen("f", *EVERY), "", [("f", EVERY_JSON)]),
    (qwen("f", ("text", CODE), ("maybe", "a word")), "", [strings("f", text=CODE, maybe="a word")]),
    (qwen("f", ("text", "")), "", [strings("f", text="")]),
    (qwen("f", ("text", TAGS)), "", [strings("f", text=TAGS)]),
    (
        qwen("f", ("count", "many"), ("unknown", "1"), ("any", "[1]")),
        "",
        [strings("f", count="many", unknown="1", any="[1]")],
    ),
    (qwen("new", ("x", "1")), "", [strings("new", x="1")]),
    ("<function=g>\n</function>", "", [("g", "{}")]),
    ("<tool_call><function=f><parameter=count>3</parameter></function></tool_call>", "", [("f", '{"count": 3}')]),
    ("<tool_call>\n<function=g>\n</function>\n<function=g></function>\n</tool_call>", "", [("g", "{}")] * 2),
    ("<tool_call>\n<function=f>\n<parameter=where>\n{}\n</function>\n</tool_call>", "", [("f", '{"where": {}}')]),
    ("<tool_call>\n<function=f>\n<parameter=text>\na\n</tool_call>", "", [strings("f", text="a")]),
    (
        "<tool_call>\n<function=f>\n<parameter=text>\na <parameter=b>\n<parameter=count>\n1\n</parameter>\n</function>",
        "",
        [("f", '{"text": "a <parameter=b>", "count": 1}')],
    ),
    (
        "<tool_call>\n<function=f>\n<parameter=\nids\n</parameter>\n<parameter=count>\n1\n</parameter>\n</function>",
        "",
        [("f", '{"count": 1}')],
    ),
    ("<tool_call>\n<function=f>\n<parameter=count>\n1", "", [("f", '{"count": ')]),
    ("<tool_call>\n<function=f>\n<parameter=text>\nabc\n</par", "", [("f", '{"text": "abc')]),
    ("Use <tool_call> and <function=f> as you like.", "Use <tool_call> and <function=f> as you like.", []),
    ("<function=><parameter=x>", "<function=><parameter=x>", []),
    (
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        [],
    ),
]
VALUE = "a</arg_value> b </tool_call>\n"
GLM = [
    ("\nJust text.\n", "\nJust text.\n", []),
    (f"So:\n{glm('g')}\n{glm('f', ('count', '7'))} Done.", "So:Done.", [("g", "{}"), ("f", '{"count": 7}')]),
    (glm("f", *EVERY), "", [("f", EVERY_JSON)]),
    (glm("f", *EVERY, line=""), "", [("f", EVERY_JSON)]),
    (glm("f", ("text", CODE), ("maybe", " a word ")), "", [strings("f", text=CODE, maybe=" a word ")]),
    (glm("f", ("text", VALUE)), "", [strings("f", text=VALUE)]),
    (glm("f", ("text", ""), ("count", "many")), "", [strings("f", text="", count="many")]),
    (glm("f", ("unknown", "1"), ("any", '{"a": [1]}')), "", [("f", '{"unknown": 1, "any": {"a": [1]}}')]),
    (glm("new", ("x y", "Oslo é")), "", [("new", '{"x y": "Oslo é"}')]),
    (
        "<tool_call>f\n<arg_key>text</arg_value>\n<arg_key>count</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "",
        [("f", '{"count": 1}')],
    ),
    ("<tool_call>f\n<arg_key>count</arg_key>\n<arg_value>1", "", [("f", '{"count": ')]),
    ("<tool_call>f\n<arg_key>text</arg_key><arg_value>abc</arg_v", "", [("f", '{"text": "abc')]),
    ("Within <tool_call> a name comes, and <arg_key>", "Within <tool_call> a name comes, and <arg_key>", []),
    ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
]
NO_END = "a</parameter> b </invoke>\n<parameter name=c> </minimax:tool_call> d"
MINIMAX = [
    ("\nJust text.\n", "\nJust text.\n", []),
    (f"So:\n\n{minimax(('g',), ('f', ('count', '7')))} Done.", "So:Done.", [("g", "{}"), ("f", '{"count": 7}')]),
    (f"{minimax(('g',))}\n{minimax(('g',))}", "", [("g", "{}")] * 2),
    (minimax(("f", *EVERY)), "", [("f", EVERY_JSON)]),
    (
        minimax(("f", ("text", f"\n{CODE}"), ("maybe", " a word "))),
        "",
        [strings("f", text=f"\n{CODE}", maybe=" a word ")],
    ),
    (minimax(("f", ("text", NO_END))), "", [strings("f", text=NO_END)]),
    (
        minimax(("f", ("text", ""), ("count", "many"), ("any", "[1]"))),
        "",
        [strings("f", text="", count="many", any="[1]")],
    ),
    (minimax(("new", ("x y", "Oslo é"))), "", [("new", '{"x y": "Oslo é"}')]),
    ('<invoke name="g"></invoke>', "", [("g", "{}")]),
    ("<minimax:tool_call><invoke name=g></invoke></minimax:tool_call>", "", [("g", "{}")]),
    (
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="te\n</parameter>\n'
        '<parameter name="count">1</parameter>\n</invoke>',
        "",
        [("f", '{"count": 1}')],
    ),
    ('<minimax:tool_call>\n<invoke name="f">\n<parameter name="count">1', "", [("f", '{"count": ')]),
    ('<minimax:tool_call><invoke name="f"><parameter name="text">abc</par', "", [("f", '{"text": "abc')]),
    ('Use <minimax:tool_call> and <invoke name="f"> so.', 'Use <minimax:tool_call> and <invoke name="f"> so.', []),
    (f'An <invoke name="f {minimax(("g",))}', 'An <invoke name="f ', [("g", "{}")]),
    ('<minimax:tool_call>{"name": "f"}', '<minimax:tool_call>{"name": "f"}', []),
]
CASES = [
    *((Qwen3Coder, *case) for case in QWEN),
    *((Glm45, *case) for case in GLM),
    *((MinimaxM2, *case) for case in MINIMAX),
]


@pytest.mark.parametrize("kind, text, said, calls", CASES)
def test_whole_and_in_two_pieces_and_character_by_character(kind, text, said, calls):
    new = partial(kind, tools=TOOLS)
    assert read(new(), [text]) == (said, calls)
    for place in range(len(text) + 1):
        assert read(new(), [text[:place], text[place:]]) == (said, calls), place
    assert read(new(), [*text, ""]) == (said, calls)


@pytest.mark.parametrize("kind, text, said, calls", CASES)
def test_wherever_an_answer_ends_its_calls_are_the_beginning_of_the_whole_ones(kind, text, said, calls):
    whole = read(kind(tools=TOOLS), [text])[1]
    for end in range(len(text)):
        found = read(kind(tools=TOOLS), [text[:end]])
        assert found == read(kind(tools=TOOLS), [*text[:end], ""]), text[:end]
        assert len(found[1]) <= len(whole)
        for (name, arguments), (whole_name, whole_arguments) in zip(found[1], whole):
            assert name == whole_name and whole_arguments.startswith(arguments), text[:end]
        if not found[1]:
            assert found[0] == text[:end]


@pytest.mark.parametrize(
    "text, types, value",
    [
        ("12", ["integer"], "12"),
        (" 12 ", ["number"], "12"),
        ("12.0", ["integer"], "12.0"),
        ("12.5", ["integer"], '"12.5"'),
        ("1e3", ["number"], "1e3"),
        ("NaN", ["number"], '"NaN"'),
        ("1_000", ["integer"], '"1_000"'),
        ("TRUE", ["boolean"], "true"),
        ("yes", ["boolean"], '"yes"'),
        ("1", ["boolean"], '"1"'),
        ("null", ["integer"], "null"),
        ("null", ["string", "integer"], '"null"'),
        ("None", ["string", "null"], "null"),
        ("5", ["string", "integer"], "5"),
        ("five", ["string", "integer"], '"five"'),
        ('{"a": NaN}', ["object"], '"{\\"a\\": NaN}"'),
        ("{'a': (1, None)}", ["object"], '{"a": [1, null]}'),
        ("{'a'}", ["object"], "\"{'a'}\""),
        ('["\\ud800"]', ["array"], '["\\ud800"]'),
        ("{'a': 1e999}", ["object"], "\"{'a': 1e999}\""),
        ("[" * 100_000, ["array"], f'"{"[" * 100_000}"'),
        ("9" * 10_000, ["integer"], f'"{"9" * 10_000}"'),
    ],
)
def test_a_text_as_a_value_of_some_types(text, types, value):
    assert json_value(text, frozenset(types)) == value
    value.encode()


def test_a_string_comes_as_it_is_written_and_a_number_when_it_is_complete():
    parser = Qwen3Coder(tools=TOOLS)
    parts = [
        "".join(part.arguments for part in parser.push(piece)[1])
        for piece in (
            "<function=f>\n<parameter=text>\n",
            "one",
            " two",
            "\n</parameter>\n<par",
            "ameter=count>\n1",
            "2\n",
        )
        + ("</parameter>\n</function>",)
    ]
    assert parts == ['{"text": "', "one", " two", "", '", "count": ', "", "12}"]


def test_many_marks_and_a_long_value_are_read_in_a_moment():
    began = time.thread_time()
    text = "<tool_call> <function=f> " * 20_000
    assert read(Qwen3Coder(), [text]) == (text, [])
    text = '<minimax:tool_call> <invoke name="' * 20_000
    assert read(MinimaxM2(), [text]) == (text, [])
    value = "</parameter> a\n" * 20_000
    text = qwen("f", ("text", value))
    pieces = ["", *(text[place : place + 4] for place in range(0, len(text), 4)), ""]
    assert read(Qwen3Coder(tools=TOOLS), pieces) == ("", [strings("f", text=value)])
    assert time.thread_time() - began < 5


def test_a_schema_with_many_references_is_read_in_a_moment():
    count = 5_000
    parts = {str(number): {"anyOf": [{"$ref": f"#/$defs/{(number + 1) % count}"}] * 10} for number in range(count)}
    parameters = {"type": "object", "properties": {"x": {"$ref": "#/$defs/0"}}, "$defs": parts}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    began = time.thread_time()
    assert read(Qwen3Coder(tools=tools), [qwen("f", ("x", "1"))]) == ("", [strings("f", x="1")])
    assert time.thread_time() - began < 2


@pytest.fixture
def post(client_of):
    """A chat with a model of a template; its answer is given."""
    engine = FakeEngine()
    engine.max_model_len = 4000

    def send(template, reply, **body):
        engine.tokenizer.chat_template, engine.reply = template, reply
        messages = [{"role": "user", "content": "Hi"}]
        return client_of(engine).post("/v1/chat/completions", messages=messages, max_tokens=len(reply), **body)

    return send


TEMPLATES = {
    Qwen3Coder: "{{ tools }}<tool_call>\\n<function=example>\\n<parameter=x>",
    Glm45: "{{ tools }}<tool_call>{name}\\n<arg_key>{key}</arg_key>\\n<arg_value>{value}</arg_value>",
    MinimaxM2: '{{ tools }}<minimax:tool_call>\\n<invoke name="f">\\n<parameter name="x">1</parameter>',
}
REPLIES = {Qwen3Coder: qwen("f", *EVERY), Glm45: glm("f", *EVERY), MinimaxM2: minimax(("f", *EVERY))}


@pytest.mark.parametrize("template, reply", [(TEMPLATES[kind], reply) for kind, reply in REPLIES.items()])
def test_calls_whole_and_streamed_by_the_server(post, template, reply):
    reply = f"Let me see.\n{reply}"
    choice = post(template, reply, tools=TOOLS).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": EVERY_JSON}
    assert choice["message"]["content"] == "Let me see." and choice["finish_reason"] == "tool_calls"
    content, (streamed,), reason = together(events(post(template, reply, tools=TOOLS, stream=True)))
    assert (content, streamed["arguments"], reason) == ("Let me see.", EVERY_JSON, "tool_calls")
    assert streamed["pieces"] > 10


@pytest.mark.parametrize("template", TEMPLATES.values())
def test_forced_calls_are_json_as_for_any_model(post, template):
    reply = '[{"name": "f", "parameters": {"count": 1}}]'
    (call,) = post(template, reply, tools=TOOLS, tool_choice="required").json()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"count": 1}'}
