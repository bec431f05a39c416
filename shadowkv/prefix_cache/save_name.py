"""What a prompt may be saved as: a name that is also valid as a file name, and cannot lead out of a directory."""

from __future__ import annotations

import re

SAVE_NAME = "[A-Za-z0-9._-]{1,64}"

_SAVE_NAME = re.compile(SAVE_NAME)


def check_save_name(name: str) -> str:
    """Returns a valid name; raises ValueError, with the name in its message, for another."""
    if _SAVE_NAME.fullmatch(name) is None:
        shown = name if len(name) <= 80 else f"{name[:80]}…"
        raise ValueError(f"{shown!r} is no name to save as: that is 1 to 64 of A-Z, a-z, 0-9, '.', '_' and '-'")
    return name
