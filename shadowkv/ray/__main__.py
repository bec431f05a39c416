"""``shadowkv ray``: each of its subcommands is the ``main`` of a module in this package."""

from __future__ import annotations

import os
import sys
from argparse import SUPPRESS, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module

from shadowkv.command_line import Parser
from shadowkv.installation import adding

COMMANDS = {
    "serve": "one server whose requests are answered by several replicas of an engine, on Ray Serve",
    "batch": "a file of requests in the OpenAI batch format, answered by several replicas, on Ray Data",
}
"""Subcommands, which are modules of this package, with their help texts. A module is imported only when its subcommand
runs, so that ``--help`` works without Ray."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns its exit code."""
    # Ray reports usage statistics unless they are disabled.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    width = max(map(len, COMMANDS))
    parser = Parser(
        prog="shadowkv ray",
        usage="shadowkv ray COMMAND ... (shadowkv ray COMMAND --help lists its flags)",
        description="commands:\n" + "\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items()),
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=SUPPRESS)
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = parser.parse_args(arguments[:1]).command
    try:
        code: int = import_module(f"shadowkv.ray.{command}").main(arguments[1:])
    except ModuleNotFoundError as error:
        if error.name not in (None, "ray"):  # Ray without Ray Serve raises this error without a name
            raise
        print(f"error: shadowkv ray {command} needs Ray: {adding('ray')}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
