"""Calls of tools in text, whole and cut at every place."""

from __future__ import annotations

import itertools
import json
import time

import pytest

from shadowkv.serve.text.tool_formats import (
    FORMATS,
    GENERIC,
    Gemma4,
    Generic,
    Hermes,
    Listed,
    Llama3Json,
    Mistral,
    Named,
    tool_format,
)
from shadowkv.serve.text.tool_parser import ToolParser

NESTED = '{"a": [{"b": "}]\\"\\\\"}], "c": {"d": "<tool_call>"}}'
F, G = ("f", '{"x": 1}'), ("g", NESTED)

CASES = [
    (Hermes, "Just text.\n", "Just text.\n", []),
    (Hermes, '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', "", [F]),
    (Hermes, f'So:\n<tool_call>{{"name": "g", "arguments": {NESTED}}}</tool_call>\n', "So:", [G]),
    (
        Hermes,
        '<tool_call>\n{"arguments": {"x": 1}, "name": "f"}\n</tool_call>\n<tool_call>\n'
        f'{{"name": "g", "id": [1], "arguments": {NESTED}}}\n</tool_call> Done.',
        "Done.",
        [F, G],
    ),
    (Hermes, '<tool_call>{"name": "f", "arguments": {"x": 1', "", [("f", '{"x": 1')]),
    (Hermes, 'a <tool_call> {"name": "f"} </tool_call> b', 'a <tool_call> {"name": "f"} </tool_call> b', []),
    (Hermes, "<tool_call>sunny <tool_ca", "<tool_call>sunny <tool_ca", []),
    (Hermes, '<tool_call>{"name": 3, "arguments": {}}', '<tool_call>{"name": 3, "arguments": {}}', []),
    (Hermes, '<tool_call>{"name": "caf\\u00e9", "arguments": {}}</tool_call>', "", [("café", "{}")]),
    (Hermes, '\n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', "", [F]),
    (Hermes, '```json\n{\n  "name": "f",\n  "arguments": {"x": 1}\n}\n```', "", [F]),
    (Hermes, f'```json\n{{"name": "g", "arguments": {NESTED}}}\n```\nDone.', "Done.", [G]),
    (Hermes, ' ```json\n{"name": "f"}\n```', ' ```json\n{"name": "f"}\n```', []),
    (Hermes, "```json\n[1]", "```json\n[1]", []),
    (Hermes, 'See ```json\n{"name": "f", "arguments": {}}```', 'See ```json\n{"name": "f", "arguments": {}}```', []),
    (Llama3Json, ' {"name": "f", "parameters": {"x": 1}}', "", [F]),
    (
        Llama3Json,
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {"x": 1}}; '
        f'{{"name": "g", "parameters": {NESTED}}}',
        "",
        [F, G],
    ),
    (Llama3Json, '{"city": "Paris", "people": 2}', '{"city": "Paris", "people": 2}', []),
    (Llama3Json, 'Use {"name": "f", "parameters": {}}', 'Use {"name": "f", "parameters": {}}', []),
    (Llama3Json, '{"name": "f", "parameters": 3}', '{"name": "f", "parameters": 3}', []),
    (Llama3Json, "{", "{", []),
    (
        Mistral,
        f'[TOOL_CALLS] [{{"name": "f", "arguments": {{"x": 1}}}}, {{"name": "g", "arguments": {NESTED}}}]',
        "",
        [F, G],
    ),
    (Mistral, f'Well [TOOL_CALLS]f{{"x": 1}}[TOOL_CALLS]g[ARGS]{NESTED}', "Well", [F, G]),
    (Mistral, "[TOOL_CALLS] [1, 2]", "[TOOL_CALLS] [1, 2]", []),
    (Mistral, "[TOOL_CALLS]f[x", "[TOOL_CALLS]f[x", []),
    (Gemma4, "Just text.\n", "Just text.\n", []),
    (Gemma4, "<|tool_call>call:f{x:1}<tool_call|>", "", [F]),
    (
        Gemma4,
        'So:\n<|tool_call>call:g{a:[{b:<|"|>}]"\\<|"|>}],c:{d:<|"|><tool_call><|"|>}}<tool_call|>\n'
        "<|tool_call>call:f{x:1}<tool_call|>",
        "So:",
        [G, F],
    ),
    (
        Gemma4,
        '<|tool_call>call:a.b-c{<|"|>two words<|"|>: [1.5, true,null,<|"|><|"|>],name:Rome,o:{}}<tool_call|> Done.',
        "Done.",
        [("a.b-c", '{"two words": [1.5, true, null, ""], "name": "Rome", "o": {}}')],
    ),
    (Gemma4, '<|tool_call>call:f{a:<|"|>Par', "", [("f", '{"a": "Par')]),
    (Gemma4, "<|tool_call>call:f{a:1,b:2", "", [("f", '{"a": 1')]),
    (Gemma4, "<|tool_call>call:f{}", "", [("f", "{}")]),
    (Gemma4, "<|tool_call>call:f{,x:1,}<tool_call|>", "", [F]),
    (Gemma4, "<|tool_call>call:f x", "<|tool_call>call:f x", []),
    (Gemma4, "<|tool_call>sunny <|tool_ca", "<|tool_call>sunny <|tool_ca", []),
    (Generic, f'[{{"name": "f", "parameters": {{"x": 1}}}}, {{"name": "g", "parameters": {NESTED}}}]', "", [F, G]),
    (Generic, '```json\n[{"name": "f", "parameters": {"x": 1}}]\n```', "", [F]),
    (Generic, ' {"name": "f", "arguments": {"x": 1}}\n', "", [F]),
    (Generic, "[1, 2] are two.", "[1, 2] are two.", []),
    (Generic, '```json\n{"city": "Paris"}\n```', '```json\n{"city": "Paris"}\n```', []),
    (Generic, "\nJust text.", "\nJust text.", []),
    (Listed, f'[{{"name": "f", "parameters": {{"x": 1}}}}, {{"name": "g", "parameters": {NESTED}}}]', "", [F, G]),
]


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls, put together as clients do."""
    said, calls, ids = "", [], set()
    for number, piece in enumerate(pieces):
        text, parts = parser.push(piece, last=number == len(pieces) - 1)
        said += text
        assert len({part.index for part in parts}) == len(parts)
        for part in parts:
            if part.name is not None:
                assert part.index == len(calls) and part.id
                ids.add(part.id)
                calls.append((part.name, ""))
            calls[part.index] = (calls[part.index][0], calls[part.index][1] + part.arguments)
    assert len(ids) == len(calls) == parser.calls
    return said, calls


@pytest.mark.parametrize("kind, text, said, calls", CASES)
def test_whole_and_in_two_pieces_and_character_by_character(kind, text, said, calls):
    assert read(kind(), [text]) == (said, calls)
    for place in range(len(text) + 1):
        assert read(kind(), [text[:place], text[place:]]) == (said, calls), place
    assert read(kind(), [*text, ""]) == (said, calls)


@pytest.mark.parametrize("kind, text, said, calls", [case for case in CASES if case[0] is not Listed])
def test_wherever_an_answer_ends_nothing_is_lost_that_was_text(kind, text, said, calls):
    for end in range(len(text)):
        cut = text[:end]
        found = read(kind(), [cut])
        assert found == read(kind(), [*cut, ""]), cut
        for (name, arguments), (whole_name, whole) in itertools.zip_longest(found[1], calls[: len(found[1])]):
            assert name == whole_name and whole.startswith(arguments)
        if not found[1]:
            assert found[0] == cut


def test_arguments_come_in_pieces_behind_the_name():
    parser = Hermes()
    pieces = ['<tool_call>{"name": "f", "argum', 'ents": {"x": "', "on", "e", '"}}', "</tool_call>"]
    parts = [part for number, piece in enumerate(pieces) for part in parser.push(piece, number == 5)[1]]
    assert [(part.name, part.arguments) for part in parts] == [
        ("f", '{"x": "'),
        *((None, text) for text in ("on", "e", '"}')),
    ]


def test_a_function_that_was_named():
    assert read(Named("f"), ["", '{"x"', ": 1}"]) == ("", [F])
    assert read(Named("f"), [""]) == ("", [("f", "")])


def test_many_marks_are_read_in_a_moment():
    text = "<tool_call> " * 50_000
    began = time.thread_time()
    assert read(Hermes(), [text]) == (text, [])
    assert time.thread_time() - began < 5


def test_a_long_argument_is_read_in_a_moment():
    text = json.dumps({"name": "f", "arguments": {"x": "a\\n" * 50_000}})
    said, calls = read(Hermes(), ["<tool_call>", *(text[place : place + 4] for place in range(0, len(text), 4)), ""])
    assert not said and json.loads(calls[0][1]) == json.loads(text)["arguments"]


TEMPLATES = {
    "hermes": "{{ tools | tojson }} within <tool_call></tool_call> XML tags",
    "llama3_json": '{{- \'Respond in the format {"name": function name, "parameters": dictionary\' }}',
    "mistral": '{{- "[TOOL_CALLS][" }}',
    "qwen3_coder": "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>",
    "glm45": "<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n<arg_value>{arg-value-1}</arg_value>",
    "minimax_m2": '<minimax:tool_call>\\n<invoke name="tool-name-1">\\n<parameter name="param-key-1">param-value-1',
    "gemma4": "{{- '<|tool_call>call:' + function['name'] + '{' -}}",
    "openai": '{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}',
    None: "<seed:tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_tells_the_format(name):
    assert tool_format(None, TEMPLATES[name]) is FORMATS.get(name)
    assert tool_format("hermes", TEMPLATES[name]) is FORMATS["hermes"]
    assert tool_format(None, None) is GENERIC


def test_mistrals_templates_take_the_ids():
    made = FORMATS["mistral"].new_id()
    assert len(made) == 9 and made.isalnum() and made.isascii()
