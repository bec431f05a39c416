"""Rules for an output other than a JSON schema, as text: what they are, and a colon before them.

JSON begins with none of these words, so a text says by itself whether it is a schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Literal

GrammarKind = Literal["regex", "grammar", "structural_tag", "choice"]

KIND = re.compile(r"(regex|grammar|structural_tag|choice):")


def grammar_text(kind: GrammarKind, rules: str) -> str:
    """Rules as ``SamplingParams.grammar`` has them: a regular expression, a grammar in GBNF (a kind of EBNF, whose root
    is the rule ``root``), a structural tag of XGrammar as JSON text, or a JSON list of the texts to choose from."""
    return f"{kind}:{rules}"


def choice_text(choices: Sequence[str]) -> str:
    """The rules of one of some texts."""
    return grammar_text("choice", json.dumps(choices, ensure_ascii=False))


def choice_grammar(rules: str) -> str:
    """The grammar, in GBNF, of a JSON list of texts to choose from."""
    return f"root ::= {' | '.join(map(_literal, json.loads(rules)))}"


def grammar_kind(text: str) -> tuple[str, str] | None:
    """A text's kind and rules; None for a JSON schema."""
    kind = KIND.match(text)
    return None if kind is None else (kind[1], text[kind.end() :])


def _literal(text: str) -> str:
    """A text in GBNF, whose escapes are those of JSON but for surrogate pairs."""
    return json.dumps(text, ensure_ascii=False)
