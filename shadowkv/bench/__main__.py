"""``shadowkv bench serve``: measures a running server from end to end, as ``vllm bench serve`` does."""

from __future__ import annotations

import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence

from shadowkv.bench import serve
from shadowkv.command_line import Parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a benchmark; returns the exit code."""
    parser = Parser(prog="shadowkv bench", description=__doc__)
    benches = parser.add_subparsers(required=True, metavar="BENCH", parser_class=Parser)
    added = benches.add_parser(
        "serve",
        help="throughput and latencies of a running server",
        description=serve.__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    serve.add_arguments(added)
    return serve.run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
