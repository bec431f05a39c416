"""``structured_outputs`` and its other names in vLLM, SGLang and llama.cpp: what the engine is told to follow, and what
is refused."""

from __future__ import annotations

import json

import pytest
from test_serve_errors import error_of
from test_serve_tools import WEATHER

from shadowkv.grammar_text import choice_grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}
FOLLOWED = [
    ({"json": SCHEMA}, json.dumps(SCHEMA)),
    ({"json": json.dumps(SCHEMA)}, json.dumps(SCHEMA)),
    ({"regex": "[a-c]+"}, "regex:[a-c]+"),
    ({"choice": ["yes", 'n"o\n']}, 'choice:["yes", "n\\"o\\n"]'),
    ({"grammar": 'root ::= "a"'}, 'grammar:root ::= "a"'),
    ({"json_object": True}, '{"type": "object"}'),
    ({"structural_tag": TAG}, f"structural_tag:{json.dumps(TAG)}"),
    ({"structural_tag": json.dumps(TAG)}, f"structural_tag:{json.dumps(TAG)}"),
]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("rules, text", FOLLOWED)
def test_rules_reach_the_engine(post, engine, endpoint, rules, text):
    answer = post(endpoint, structured_outputs=rules)
    assert answer.is_success, answer.text
    assert engine.params[-1].rules == text
    (name,) = rules
    if name in ("json", "regex", "choice", "grammar"):
        assert post(endpoint, **{f"guided_{name}": rules[name]}).is_success
        assert engine.params[-1].rules == text


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize(
    "body, text",
    [
        ({"regex": "[a-c]+"}, "regex:[a-c]+"),
        ({"ebnf": 'root ::= "a"'}, 'grammar:root ::= "a"'),
        ({"grammar": 'root ::= "a"'}, 'grammar:root ::= "a"'),
        ({"json_schema": SCHEMA}, json.dumps(SCHEMA)),
        ({"json_schema": json.dumps(SCHEMA)}, json.dumps(SCHEMA)),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, json.dumps(SCHEMA)),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, json.dumps(SCHEMA)),
    ],
)
def test_rules_by_the_names_of_sglang_and_llama_cpp(post, engine, endpoint, body, text):
    assert post(endpoint, **body).is_success
    assert engine.params[-1].rules == text


def test_a_response_format_may_be_a_tag(post, engine):
    assert post("chat", response_format=TAG).is_success
    assert engine.params[-1].grammar == f"structural_tag:{json.dumps(TAG)}"


def test_white_space_can_be_turned_off(post, engine):
    assert post("chat", structured_outputs={"json": SCHEMA, "disable_any_whitespace": True}).is_success
    assert engine.params[-1].json_one_line


@pytest.mark.parametrize(
    "body, param",
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": True}}, "structured_outputs.json"),
        ({"guided_regex": "a", "guided_json": SCHEMA}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
        ({"grammar": 'root ::= "a"', "json_schema": SCHEMA}, "json_schema"),
        ({"regex": ""}, "regex"),
        ({"json_schema": "["}, "json_schema"),
        ({"response_format": {"type": "json_object", "schema": []}}, "response_format"),
        ({"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}}, "response_format"),
        ({"stop_regex": "a|b"}, "stop_regex"),
        ({"no_stop_trim": True}, "no_stop_trim"),
        ({"typical_p": 0.9}, "typical_p"),
        ({"guided_regex": "a", "tools": [WEATHER]}, "structured_outputs"),
        ({"guided_choice": "a"}, "guided_choice"),
    ],
)
def test_refusals_name_the_field(post, body, param):
    assert error_of(post("chat", **body), 400)["param"].removesuffix(".constrained-str") == param


def test_a_choice_may_have_any_characters():
    assert choice_grammar(json.dumps(["é\t\\", "💥"])) == 'root ::= "é\\t\\\\" | "💥"'
