"""The command ``shadowkv``. Each subcommand runs ``main`` of a package's ``__main__`` module, as ``python -m`` does."""

from __future__ import annotations

import os
import signal
import sys
from argparse import SUPPRESS, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import NoReturn

from shadowkv import __version__
from shadowkv.command_line import Parser

COMMANDS = {
    "serve": "an OpenAI-compatible server, or a batch run over a file",
    "eval": "what cache policies cost in quality",
    "plan": "estimate memory, largest batch and shortest step time of cache policies",
    "bench": "measure a running server",
    "ray": "several replicas on Ray: one server, or a batch file",
    "doctor": "list the backend of each op on this machine, and how to get a faster one",
    "cache": "list, verify, prune, export and import cached prompts on disk",
}

PACKAGES = {"cache": "prefix_cache"}
"""Maps a command to its package, for commands whose package has another name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns its exit code."""
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
        with _stopped_at_once():
            module = import_module(f"shadowkv.{PACKAGES.get(command, command)}.__main__")
        code: int = module.main(arguments[1:])
    except KeyboardInterrupt:  # Ctrl-C outside the imports, at a point where the command does not handle it itself
        print("stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    return code


@contextmanager
def _stopped_at_once() -> Iterator[None]:
    """A context in which Ctrl-C ends the process at once. A KeyboardInterrupt would not be enough, because code that
    runs during an import can catch or replace it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not so in a background process, which ignores the signal
        signal.signal(signal.SIGINT, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    print("stopped", file=sys.stderr, flush=True)
    os._exit(128 + number)
