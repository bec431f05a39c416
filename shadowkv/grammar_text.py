"""Writes grammars other than JSON schemas as text: the kind of the grammar, a colon, and the grammar.

``SamplingParams.grammar`` has either such a text or a JSON schema. JSON never begins with one of the kinds and a colon,
so the beginning of the text shows which of the two it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Literal

GrammarKind = Literal["regex", "grammar", "structural_tag", "choice"]

KIND = re.compile(r"(regex|grammar|structural_tag|choice):")


def grammar_text(kind: GrammarKind, rules: str) -> str:
    """Returns the text of a grammar for ``SamplingParams.grammar``. Depending on ``kind``, ``rules`` is a regular
    expression, a grammar in GBNF (a dialect of EBNF with the start rule ``root``), a structural tag of XGrammar as JSON
    text, or a JSON list of choices."""
    return f"{kind}:{rules}"


def choice_text(choices: Sequence[str]) -> str:
    """Returns the text of a grammar that allows only ``choices`` as answers."""
    return grammar_text("choice", json.dumps(choices, ensure_ascii=False))


def choice_grammar(rules: str) -> str:
    """Converts a JSON list of choices to a grammar in GBNF."""
    return f"root ::= {' | '.join(map(_literal, json.loads(rules)))}"


def grammar_kind(text: str) -> tuple[str, str] | None:
    """Splits a grammar's text into the kind and the rules. Returns None for a JSON schema."""
    kind = KIND.match(text)
    return None if kind is None else (kind[1], text[kind.end() :])


def _literal(text: str) -> str:
    """Returns ``text`` as a literal in GBNF. GBNF has the escapes of JSON, except for surrogate pairs."""
    return json.dumps(text, ensure_ascii=False)
