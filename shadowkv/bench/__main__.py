"""``shadowkv bench``: measures a running server, or the HTTP process alone."""

from __future__ import annotations

import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence

from shadowkv.bench import frontend, serve
from shadowkv.command_line import Parser

BENCHES = {
    "serve": (serve, "throughput and latencies of a running server"),
    "frontend": (frontend, "tokens per second of the HTTP process alone, with a mock engine"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a benchmark; returns the exit code."""
    parser = Parser(prog="shadowkv bench", description=__doc__)
    benches = parser.add_subparsers(required=True, metavar="BENCH", parser_class=Parser)
    for name, (bench, text) in BENCHES.items():
        added = benches.add_parser(
            name, help=text, description=bench.__doc__, formatter_class=RawDescriptionHelpFormatter
        )
        bench.add_arguments(added)
        added.set_defaults(run=bench.run)
    args = parser.parse_args(argv)
    code: int = args.run(args)
    return code


if __name__ == "__main__":
    sys.exit(main())
