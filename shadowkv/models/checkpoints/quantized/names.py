"""Patterns for modules in a config: names, components of names, globs with ``*``, or regular expressions after
``re:``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

MAX_REPEATS, MAX_CHARACTERS = 6, 300
_REPEATED_GROUP = re.compile(r"\)\s*[*+{]")


def matches(module: str, pattern: str) -> bool:
    """Whether a pattern matches a module or a module that contains it; raises ValueError for a bad regular expression.

    Args:
        module: the module's name, such as ``model.layers.0.self_attn.q_proj``.
        pattern: one of three kinds. After ``re:`` it is a regular expression for the start of the name, as in
            compressed-tensors. With ``*`` it is a glob for the whole name, as in modelopt. Otherwise it is the name, or
            neighbouring components of it, such as ``self_attn`` or ``layers.0``.
    """
    if pattern.startswith("re:"):
        return _compiled(pattern[3:]).match(module) is not None
    if "*" in pattern:
        return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")
    return f".{pattern}." in f".{module}."


def any_matches(module: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns matches, as in ``matches``."""
    return any(matches(module, pattern) for pattern in patterns)


def list_of_names(value: object, name: str) -> tuple[str, ...]:
    """A config's list of patterns; raises ValueError if it is something else."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) and len(item) <= MAX_CHARACTERS for item in value):
        raise ValueError(f"{name}={str(value)[:60]} is not a list of names")
    return tuple(value)


def _compiled(expression: str) -> re.Pattern[str]:
    """Compiles an expression; refuses one that could take long on a name of 60 characters, since files may be
    malicious."""
    repeats = sum(expression.count(mark) for mark in "*+{")
    if _REPEATED_GROUP.search(expression) or repeats > MAX_REPEATS:
        raise ValueError(f"the regular expression {expression!r} repeats too much to be matched safely")
    try:
        return re.compile(expression)
    except re.error as error:
        raise ValueError(f"{expression!r} is not a regular expression: {error}") from error
