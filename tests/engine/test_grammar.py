"""Output that follows a JSON schema."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from shadowkv import LLM, SamplingParams
from shadowkv.engine.request import RequestError
from shadowkv.engine.structured import grammar_pool
from shadowkv.engine.structured.grammar import Grammars
from shadowkv.engine.structured.json_schema import MAX_GRAMMAR_CHARS, parse_schema, with_prefix_items
from shadowkv.grammar_text import choice_text, grammar_text
from shadowkv.models.tokenization.tokenizer_files import byte_tokenizer
from tests.grammar_answers import SECONDS, accepts, begun

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    grammars = Grammars(byte_tokenizer(300, [256]), 300, frozenset([256]))
    yield grammars
    grammars.pool.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_follow_the_schema_beside_free_ones(llm: LLM, temperature: float) -> None:
    prompt = llm.get_tokenizer().apply_chat_template([{"role": "user", "content": "Describe Paris in JSON."}])
    bound = SamplingParams(max_tokens=80, temperature=temperature, seed=1, json_schema=json.dumps(SCHEMA))
    free = SamplingParams(max_tokens=12, temperature=0.0)
    answer, other = llm.generate([prompt, prompt], [bound, free])
    found = json.loads(answer.outputs[0].text)
    assert answer.outputs[0].finish_reason == "stop"
    assert set(found) == {"city", "people"}
    assert isinstance(found["people"], int)
    (alone,) = llm.generate([prompt], free)
    assert other.outputs == alone.outputs


def node(**more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"], **more}


def chain(length: int, last: Any) -> dict[str, Any]:
    names = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}, "minItems": 1} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**names, f"d{length}": last}}


EMPTY = [
    {"$ref": "#"},
    node(),
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"anyOf": []},
    {"anyOf": [node(), False, {"oneOf": []}]},
    {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]},
    chain(500, {"$ref": "#/$defs/d7"}),
]
ANSWERABLE = [
    node(required=[]),
    {**node(), "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
    {"type": "array", "items": {"$ref": "#"}},
    chain(500, {"type": "integer"}),
    {"enum": [1], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
]


@pytest.mark.parametrize("schema", ["{nope", '{"type": "nope"}', "[]", '{"minimum": NaN}', *map(json.dumps, EMPTY)])
def test_a_schema_that_cannot_be_followed_is_refused(grammars: Grammars, schema: str) -> None:
    with pytest.raises(RequestError, match="schema") as caught:
        grammars.compile(schema).result(SECONDS)
    assert caught.value.param == "response_format"
    message = str(caught.value)
    assert not [part for part in (".cc:", "Check failed", "/project", "is false") if part in message]
    assert message.startswith("the JSON schema cannot be followed: ") and 40 < len(message) < 400


@pytest.mark.parametrize("reference", ["http://elsewhere/a\nforged line", "#name", "", "x" * 10_000])
def test_a_reference_to_elsewhere_is_refused_and_not_logged(
    grammars: Grammars, capfd: pytest.CaptureFixture[str], reference: str
) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": reference}}}
    with pytest.raises(RequestError, match=r"\$ref '.* must be '#' or begin with '#/'") as caught:
        grammars.compile(json.dumps(schema)).result(SECONDS)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("schema", ANSWERABLE)
def test_recursion_that_may_end_is_followed(grammars: Grammars, schema: Any) -> None:
    constraint, logits = begun(grammars, json.dumps(schema)), torch.zeros(300)
    constraint.mask(logits)
    assert logits.isfinite().any()


TUPLE = {"type": "array", "items": [{"type": "integer"}, {"const": "a"}], "additionalItems": False}


@pytest.mark.parametrize("text, follows", [('[1, "a"]', True), ('["a", 1]', False), ('[1, "a", 2]', False)])
def test_items_may_be_a_list_as_in_earlier_drafts(grammars: Grammars, text: str, follows: bool) -> None:
    constraint = begun(grammars, json.dumps(TUPLE))
    assert all([accepts(constraint, byte) for byte in text.encode()]) is follows


def test_such_lists_are_found_wherever_schemas_are_and_nowhere_else() -> None:
    schema = '{"properties": {"default" : {"items" : [{"const": 1}]}}, "enum": [{"items": [1]}]}'
    found = json.loads(with_prefix_items(schema))
    assert found == {"properties": {"default": {"prefixItems": [{"const": 1}]}}, "enum": [{"items": [1]}]}


@pytest.mark.parametrize("levels", [10_000, 10**5])
def test_a_schema_that_is_nested_too_deep_is_refused(grammars: Grammars, levels: int) -> None:
    with pytest.raises(RequestError, match=r"recursion|characters"):
        grammars.compile('{"items":' * levels + "{}" + "}" * levels).result(SECONDS)


def test_a_chain_of_references_that_would_overflow_the_compiler_is_refused(grammars: Grammars) -> None:
    with pytest.raises(RequestError, match=f"{MAX_GRAMMAR_CHARS} are supported"):
        grammars.compile(json.dumps(chain(20_000, {"type": "integer"}))).result(SECONDS)


@pytest.mark.parametrize("last", [{}, False])
def test_references_are_followed_in_any_order(last: Any) -> None:
    count = 3_500
    rules = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in random.Random(0).sample(range(count), count)}
    with nullcontext() if last == {} else pytest.raises(ValueError, match="no finite JSON"):
        parse_schema(json.dumps({"$ref": "#/$defs/0", "$defs": {**rules, str(count): last}}))


@pytest.mark.parametrize("one_line", [False, True])
def test_white_space_in_one_line_is_that_of_json_dumps(grammars: Grammars, one_line: bool) -> None:
    for text, fine in (('{"a": [1, 2]}', True), ('{"a":[1,2]}', not one_line), ('{ "a": [1,\n 2]}', not one_line)):
        constraint = begun(grammars, '{"properties": {"a": {"items": {"type": "integer"}}}}', one_line)
        assert all(accepts(constraint, token) for token in text.encode()) == fine, text


def test_a_dead_end_on_the_way_is_said(grammars: Grammars) -> None:
    constraint = begun(grammars, '{"enum": ["a"]}')
    assert [accepts(constraint, token) for token in b'"b'] == [True, False]


def test_a_schema_and_ignore_eos_contradict(llm: LLM) -> None:
    with pytest.raises(RequestError, match="ignore_eos"):
        llm.engine.requests.limits.check([5], SamplingParams(json_schema="{}", ignore_eos=True))


def strings(count: int, **more: Any) -> dict[str, Any]:
    """An object of so many strings, each with a length of its own."""
    return {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "maxLength": 900 + i, **more} for i in range(count)},
    }


COSTLY = [
    {"type": "string", "pattern": "^(([a-z]{1,200}){1,200}){1,200}$"},
    {"type": "object", "patternProperties": {f"^[a-z]{{1,{i}}}$": {} for i in range(1, 500)}},
    {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": strings(40)}},
]


@pytest.mark.parametrize("schema", COSTLY)
def test_a_schema_of_many_states_is_refused(grammars: Grammars, monkeypatch: pytest.MonkeyPatch, schema: Any) -> None:
    monkeypatch.setattr(grammar_pool, "ATTEMPTS", ((0.1, 6),))  # the cheapest takes 0.5 seconds
    with pytest.raises(RequestError, match="compiling it takes more than 0 seconds"):
        grammars.compile(json.dumps(schema)).result(SECONDS)


@pytest.mark.parametrize("schema", [{"type": "string", "minLength": 1, "maxLength": 3}, {"type": "string"}])
def test_strings_have_no_control_characters(grammars: Grammars, schema: Any) -> None:
    constraint = begun(grammars, json.dumps(schema))
    assert accepts(constraint, ord('"'))
    logits = torch.zeros(300)
    constraint.mask(logits)
    may_come = set((logits == 0).nonzero().flatten().tolist())
    assert not may_come & {*range(32), ord("\n")} and {ord("a"), ord(" "), 0x7F} <= may_come


def test_the_end_may_come_although_its_text_is_a_control_character() -> None:
    grammars = Grammars(byte_tokenizer(300, []), 300, frozenset([0]))
    try:
        constraint = begun(grammars, '{"type": "boolean"}')
        assert all([accepts(constraint, byte) for byte in b"true"]) and accepts(constraint, 0)
    finally:
        grammars.pool.close()


TAG = {
    "type": "tag",
    "begin": "<n>",
    "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
    "end": "</n>",
}
OTHER_RULES = [
    (grammar_text("regex", r"[a-c]{2}-\d\t"), "ab-7\t", "ab7"),
    (choice_text(["yes", 'n"\n\té', "💥"]), 'n"\n\té', "no"),
    (choice_text(["yes", "💥"]), "💥", "é"),
    (grammar_text("grammar", 'root ::= "(" root ")" | "x"'), "((x))", "(x("),
    (grammar_text("structural_tag", json.dumps({"type": "structural_tag", "format": TAG})), "<n>12</n>", "<n>a"),
]


@pytest.mark.parametrize("rules, follows, breaks", OTHER_RULES)
def test_other_rules_than_schemas(grammars: Grammars, rules: str, follows: str, breaks: str) -> None:
    constraint = begun(grammars, rules)
    logits = torch.zeros(300)
    for byte in follows.encode():
        masked = logits.clone()
        constraint.mask(masked)
        assert masked[byte] == 0
        assert accepts(constraint, byte)
    assert accepts(constraint, 256)  # the end
    assert not accepts(constraint, 256)
    other = begun(grammars, rules)
    assert not all([accepts(other, byte) for byte in breaks.encode()])


@pytest.mark.parametrize(
    "rules, what",
    [
        ("regex:(a", "regex"),
        ("grammar:x", "grammar"),
        ("structural_tag:{}", "structural tag"),
        ("regex:" + "a" * 2**17, "regex"),
    ],
)
def test_other_rules_that_cannot_be_followed(grammars: Grammars, rules: str, what: str) -> None:
    with pytest.raises(RequestError, match=f"the {what} cannot be followed") as caught:
        grammars.compile(rules).result(SECONDS)
    assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize("pattern", ["(a", "a{9", "a**", r"\p{L}"])
def test_a_regular_expression_that_cannot_be_read_is_refused(grammars: Grammars, pattern: str) -> None:
    with pytest.raises(RequestError, match="the regex cannot be followed: Regex parsing error") as caught:
        grammars.compile(f"regex:{pattern}").result(SECONDS)
    assert caught.value.param == "structured_outputs"


def test_an_answer_follows_a_regular_expression(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=20, temperature=1.0, seed=1, grammar=grammar_text("regex", "(red|blue), [0-9]{3}")
    )
    answer = llm.generate(["Colour and number:"], params)[0].outputs[0]
    colour, _, number = answer.text.partition(", ")
    assert answer.finish_reason == "stop" and colour in ("red", "blue") and len(number) == 3 and number.isdigit()
    with pytest.raises(ValueError, match="left out with json_schema"):
        SamplingParams(grammar="regex:a", json_schema="{}")


def test_a_grammar_without_an_end_gets_no_hanging_answer(llm: LLM) -> None:
    with pytest.raises(RuntimeError, match="nothing can follow"):
        llm.generate(["Go:"], SamplingParams(max_tokens=5, grammar=grammar_text("grammar", "root ::= root")))
