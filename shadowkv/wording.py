"""Wording of messages: errors that can name settings as Python fields or as flags, and nouns with numbers."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Mapping

GIB = 2**30
"""Bytes of a GiB."""

_VALUE = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[-+\w]+(?:\.[-+\w]+)*"
"""Pattern of a value in a message, as ``repr`` writes texts, numbers and booleans."""

_QUOTES = "'\""


class NamesSettings(Exception):
    """An error whose message names settings as Python fields: ``max_num_seqs=-3 must be at least 1``.

    Args:
        message: the message, with settings as ``name=value``. Names with underscores can also stand without a value.
        settings: names of the settings. Other names in the message, for example fields of a file, are not settings.
    """

    def __init__(self, message: str, settings: Iterable[str]) -> None:
        super().__init__(message)
        self.settings = tuple(settings)

    def __reduce__(self) -> tuple[type[NamesSettings], tuple[str, tuple[str, ...]]]:
        return type(self), (str(self), self.settings)

    def as_flags(self, renamed: Mapping[str, str]) -> str:
        """Returns the message for a user who typed flags: ``--max-num-seqs -3 must be at least 1``.

        Args:
            renamed: maps a setting to its flag, for flags that are not the setting's name with dashes for underscores.
        """

        def flag(found: re.Match[str]) -> str:
            name, value = found["name"], found["value"]
            if value is None and "_" not in name:  # without a value, names like role and model are plain words
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
    """Invalid settings."""


class OutOfMemory(NamesSettings, MemoryError):
    """Settings that need more memory than is available."""


def counted(count: int, noun: str) -> str:
    """Returns the number with the noun in singular or plural: ``1 token``, ``2 tokens``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
