"""A chat template computes its prompt in bounded time and memory, reaches nothing else, and fails with ValueError."""

from __future__ import annotations

import time

import pytest
from bad_files import SECONDS, little_memory

from shadowkv.models.tokenization import template_bounds
from shadowkv.models.tokenization.chat_template import MAX_CHARACTERS, ChatTemplate

MESSAGES = [{"role": "user", "content": "Hi"}]
GROW = "{% set ns = namespace(x='x') %}{% for i in range(99999) %}"
TWICE = "{% for i in range(2) %}"
TREE = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
ON_AND_ON = TWICE * 18 + "x" * 9999 + "{% endfor %}" * 18
LIST = "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}"
NUMBER = "{% set ns = namespace(x=9) %}{% for i in range(99) %}"
NAMESPACES = "{% set s = namespace(v=0) %}{% for i in range(60) %}{% set s.v = namespace(a=s.v, b=s.v) %}{% endfor %}"
VIEWS = NAMESPACES.replace("namespace(a=s.v, b=s.v)", "{1: s.v, 2: s.v}.values()")

HOSTILE: dict[str, str] = {
    "loop of 10^9": "{% for i in range(10**9) %}x{% endfor %}",
    "loops in loops": "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4,
    "loops in loops of texts": "{% for i in 'x' * 99999 %}" * 4 + "{% endfor %}" * 4,
    "loops with conditions": "{% for i in range(99999) if false %}{% endfor %}" * 9999,
    "recursive macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for x in [1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 1]) }}{% endif %}{% endfor %}",
    "output without end": ON_AND_ON,
    "output of a macro without end": "{% macro f() %}" + ON_AND_ON + "{% endmacro %}{{ f() }}",
    "text times number": "{{ ('x' * 10**10)[:1] }}",
    "number times text": "{{ (10**10 * 'x')[:1] }}",
    "list times number": "{{ ([1] * 10**10)[:1] }}",
    "power of powers": "{{ (10 ** (10 ** 10)) % 2 }}",
    "squares of squares": NUMBER + "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "shifted by a filter": "{{ 'x' | center(10**10) }}",
    "shifted by a method": "{{ 'x'.ljust(10**10) }}",
    "zeros": "{{ '1'.zfill(10**10) }}",
    "tabs": "{{ '\t'.expandtabs(10**10) }}",
    "wide format": "{{ '%10000000000d' % 1 }}",
    "wide format by argument": "{{ '%*d' % (10**10, 1) }}",
    "wide format by filter": "{{ '%10000000000d' | format(1) }}",
    "wide new format": "{{ '{:10000000000}'.format(1) }}",
    "wide new format by argument": "{{ '{:{}}'.format(1, 10**10) }}",
    "doubled by ~": GROW + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubled by +": GROW + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubled by a block": GROW + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "doubled by format": GROW + "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "doubled by new format": GROW + "{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
    "doubled by join": GROW + "{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
    "doubled by replace": GROW + "{% set ns.x = ns.x.replace('x', 'xx') %}{% endfor %}",
    "doubled list": LIST + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubled tree": TREE + "{{ ns.x }}",
    "doubled tree as JSON": TREE + "{{ ns.x | tojson }}",
    "doubled namespaces": NAMESPACES + "{{ s.v }}",
    "doubled namespaces in a list": NAMESPACES + "{{ [s.v] }}",
    "doubled namespaces with ~": NAMESPACES + "{{ 'x' ~ s.v }}",
    "doubled namespaces as text": NAMESPACES + "{{ s.v | string }}",
    "doubled namespaces in a format": NAMESPACES + "{{ '%s' % s.v }}{{ '{}'.format(s.v) }}",
    "doubled namespaces between texts": NAMESPACES + "{{ [1, 2] | join(s.v) }}",
    "doubled namespaces as text one by one": NAMESPACES + "{{ [s.v] | map('string') | list }}",
    "doubled namespaces in an iterator": NAMESPACES + "{{ [[s.v]] | map('first') | join }}",
    "doubled namespaces in an error": NAMESPACES + "{{ raise_exception(s.v) }}",
    "doubled namespaces that are no filter": NAMESPACES + "{{ [1] | map(s.v) | list }}",
    "doubled namespaces that are no attribute": NAMESPACES + "{{ 1 | attr(s.v) }}",
    "doubled namespaces that are no item": NAMESPACES + "{{ [][s.v].x }}",
    "doubled namespaces that are no slice": NAMESPACES + "{{ [][s.v:].x }}",
    "doubled lists that are not there": TREE + "{{ [1].index(ns.x) }}",
    "doubled views": VIEWS + "{{ s.v }}",
    "doubled views in an iterator": VIEWS + "{{ s.v | join }}",
    "much between the items of an iterator": "{{ ('x' * 999999).join(('y' * 9999) | map('upper')) | length }}",
    "replace of all by much": "{{ ('x' * 999999).replace('x', 'y' * 999999) | length }}",
    "join by much": "{{ (range(99999) | join('y' * 999999)) | length }}",
    "indented much": "{{ (('x\n' * 99999) | indent(999999)) | length }}",
    "JSON indented much": "{{ [1, 2] | tojson(indent=10**10) }}",
    "batches": "{{ [1] | batch(10**10, 'x') | list }}",
    "lorem ipsum": "{{ lipsum(10**9) }}",
}  # fmt: skip
FAILING: dict[str, str] = {
    "raises": "{{ raise_exception('no tools here') }}",
    "raises what is no text": "{{ raise_exception(messages) }}",
    "undefined attribute": "{{ nothing.at.all }}",
    "wrong type": "{{ 1 + 'a' }}",
    "division by zero": "{{ 1 / 0 }}",
    "missing argument": "{{ 'a'.replace() }}",
    "a call of no function": "{{ 'a'() }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import '../x' as x %}",
    "extends": "{% extends 'config.json' %}",
    "class of a value": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "class by subscript": "{{ ''['__class__']['__mro__'] }}",
    "class by filter": "{{ (messages | attr('__class__')).__base__ }}",
    "class by format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "globals of a function": "{{ raise_exception.__globals__.x }}",
    "globals of a macro": "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__.os }}",
    "code of a function": "{{ strftime_now.__code__.co_consts }}",
    "globals of the loop": "{% for x in [1] %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "environment": "{{ self._TemplateReference__context.environment.cache }}",
    "changes its messages": "{{ messages.append(1) }}",
    "bad date format": "{{ strftime_now(3) }}",
    "what is no JSON": "{{ namespace() | tojson }}",
    "half a surrogate pair": "{{ '\\ud800' }}",
}  # fmt: skip


def refused(source: str) -> str:
    start = time.monotonic()
    with little_memory(), pytest.raises(ValueError, match="the chat template") as raised:
        ChatTemplate(source).render(MESSAGES)
    assert time.monotonic() - start < SECONDS
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE)
def test_what_never_ends_is_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name != "loops in loops":  # at the real limit one is enough
        monkeypatch.setattr(template_bounds, "MAX_STEPS", 1 << 16)
    assert len(refused(HOSTILE[name])) < 600


@pytest.mark.parametrize("name", FAILING)
def test_what_fails_or_reaches_out_is_refused(name: str) -> None:
    refused(FAILING[name])


def test_real_prompts_are_far_from_the_limits() -> None:
    template = ChatTemplate(
        "{% set ns = namespace(turns=0) %}{% for message in messages %}{% if message.role == 'user' %}"
        "{% set ns.turns = ns.turns + 1 %}{% endif %}"
        "{{ '%02d ' % ns.turns ~ message.role + ': ' + message.content | trim }}"
        "{{ '{:>8,}'.format(12345) if loop.last else '\n' }}{% endfor %}{{ tools | tojson(indent=4) }}{{ '-' * 40 }}"
    )
    word = "long " * 50_000
    messages = [{"role": role, "content": word} for role in ("user", "assistant")] * 20
    prompt = template.render(messages, tools=[{"name": "f", "parameters": {"limit": 10**18}}] * 100)
    assert len(prompt) > 40 * 249_999 and prompt.endswith("-" * 40)
    turns = [{"role": "user", "content": "x"}] * 5000
    assert template.render(turns, tools=[]).startswith("01 user: x\n02 user: x\n")


def test_iterators_and_views_are_joined() -> None:
    template = ChatTemplate(
        "{% set d = {'a': 'x', 'b': 'y'} %}{{ d.values() | join('-') }} {{ ', '.join(d | map('upper')) }} "
        "{{ d.keys() | list }} {{ messages | map(attribute='role') | join }}{{ none }}{{ nothing }}{{ 2.5 }}"
    )
    assert template.render(MESSAGES) == "x-y A, B ['a', 'b'] userNone2.5"


def test_the_longest_prompt() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    assert len(template.render([{"content": "x" * MAX_CHARACTERS}])) == MAX_CHARACTERS
    with pytest.raises(ValueError, match="characters"):
        template.render([{"content": "x" * (MAX_CHARACTERS + 1)}])
