"""What the commands share: mistakes in their flags are one line, and help has no markup."""

from __future__ import annotations

import argparse
from typing import NoReturn

from shadowkv.wording import NamesSettings


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and where flags are listed, instead of listing them."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")

    def format_help(self) -> str:
        """Quotes of docstrings, which descriptions come from, are plain ones."""
        return super().format_help().replace("``", "'")


def one_line(error: BaseException, **renamed: str) -> str:
    """What went wrong, in one line also where it lists reasons; the error's type where it says nothing.

    Settings are named by their flags; ``renamed`` has those that are called otherwise.
    """
    text = error.as_flags(renamed) if isinstance(error, NamesSettings) else str(error)
    first, *reasons = [line.strip().removeprefix("- ") for line in text.splitlines() if line.strip()] or [
        type(error).__name__
    ]
    return f"{first} {'; '.join(reasons)}".rstrip()
