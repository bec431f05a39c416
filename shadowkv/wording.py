"""How messages name settings and numbers: Python has fields, a command line flags, and one token is no "1 tokens"."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Mapping

GIB = 2**30
"""Bytes."""

_VALUE = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[-+\w]+(?:\.[-+\w]+)*"
"""A value in a message, as ``repr`` writes texts, numbers and booleans."""

_QUOTES = "'\""


class NamesSettings(Exception):
    """An error whose message names settings as Python does: ``max_num_seqs=-3 must be at least 1``.

    Args:
        message: has settings as ``name=value``; those of several words may stand without a value, too.
        settings: their names. Whatever else the message names, a file's fields for example, is not one.
    """

    def __init__(self, message: str, settings: Iterable[str]) -> None:
        super().__init__(message)
        self.settings = tuple(settings)

    def __reduce__(self) -> tuple[type[NamesSettings], tuple[str, tuple[str, ...]]]:
        return type(self), (str(self), self.settings)

    def as_flags(self, renamed: Mapping[str, str]) -> str:
        """The message for a user who typed flags: ``--max-num-seqs -3 must be at least 1``.

        Args:
            renamed: flags of settings that are not called as these are, with dashes.
        """

        def flag(found: re.Match[str]) -> str:
            name, value = found["name"], found["value"]
            if value is None and "_" not in name:  # role, model: words
                return found[0]
            flag = renamed.get(name, f"--{name.replace('_', '-')}")
            if value is None or value == "True":
                return flag
            if value == "False":
                return f"--no-{flag.removeprefix('--')}"
            return f"{flag} {shlex.quote(ast.literal_eval(value)) if value[0] in _QUOTES else value}"

        names = "|".join(sorted(self.settings, key=len, reverse=True))
        return re.sub(rf"\b(?P<name>{names})\b(?:=(?P<value>{_VALUE})|(?![.=]\w))", flag, str(self))


class SettingsError(NamesSettings, ValueError):
    """Settings that are not valid."""


class OutOfMemory(NamesSettings, MemoryError):
    """Settings that need more memory than there is."""


def counted(count: int, noun: str) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
