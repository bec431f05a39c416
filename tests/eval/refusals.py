"""What the command says of flags that cannot be."""

from __future__ import annotations

import pytest

from shadowkv.eval import __main__ as command


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr, without its ``error:``, of a command that ends with status 2, perhaps after loading."""
    try:
        status: object = command.main(arguments)
    except SystemExit as exit:
        status = exit.code
    lines = capsys.readouterr().err.strip().splitlines()
    error = "\n".join(lines[1:] if lines[0].startswith("loading ") else lines)
    assert status == 2
    assert error.startswith("error: ")
    assert "\n" not in error
    return error.removeprefix("error: ")
