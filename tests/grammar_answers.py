"""Answers that follow grammars, for tests: what their processes find is waited for."""

from __future__ import annotations

from shadowkv.engine.structured.grammar import GrammarConstraint, Grammars

SECONDS = 120
"""Most that anything takes, on any machine."""


def begun(grammars: Grammars, rules: str, one_line: bool = False, tenant: str = "") -> GrammarConstraint:
    """An answer of which it is known what may come first; raises what compiling its rules raises."""
    grammars.compile(rules, one_line, tenant=tenant).result(SECONDS)
    answer = grammars.constraint(rules, one_line, tenant)
    answer.start()
    assert answer.is_ready(SECONDS)
    return answer


def accepts(answer: GrammarConstraint, token: int) -> bool:
    """Whether a token may come next; then it is known what may follow."""
    accepted = answer.accept(token)
    assert answer.is_ready(SECONDS)
    return accepted
