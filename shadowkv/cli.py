"""The command ``shadowkv``: each of its subcommands is the ``main`` of a package, as ``python -m`` runs it."""

from __future__ import annotations

import signal
import sys
from argparse import SUPPRESS, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module

from shadowkv import __version__
from shadowkv.command_line import Parser

COMMANDS = {
    "serve": "an OpenAI-compatible server, or a batch run over a file",
    "eval": "what cache policies cost in quality",
    "plan": "memory, largest batch and time floor of cache policies",
    "bench": "measure a running server",
    "ray": "several replicas on Ray: one server, or a batch file",
    "doctor": "which backend each op runs in here, why no faster one, and what to do",
    "cache": "list, verify, prune, export and import cached prompts on disk",
}

PACKAGES = {"cache": "prefix_cache"}
"""Packages of commands that have another name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    width = max(map(len, COMMANDS))
    parser = Parser(
        prog="shadowkv",
        usage="shadowkv COMMAND ... (shadowkv COMMAND --help lists its flags)",
        description="commands:\n" + "\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items()),
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"shadowkv {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=SUPPRESS)
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = parser.parse_args(arguments[:1]).command
    try:
        code: int = import_module(f"shadowkv.{PACKAGES.get(command, command)}.__main__").main(arguments[1:])
    except KeyboardInterrupt:  # while it imports, which takes seconds: later, commands see to it
        print("stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    return code
