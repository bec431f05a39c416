"""``shadowkv eval <suite>``: measures the quality of cache policies, all on the same samples."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shadowkv.command_line import one_line
from shadowkv.engine.config import EngineConfig
from shadowkv.eval.arguments import check, parser
from shadowkv.threads import wait_asleep


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    args = parser(__doc__).parse_args(arguments)
    try:
        check(args)
    except (ValueError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    print(f"loading {args.model or EngineConfig.model}", file=sys.stderr, flush=True)
    wait_asleep()
    from shadowkv.eval.command import execute  # it loads PyTorch, which is too slow for --help and errors

    return execute(args, arguments)


if __name__ == "__main__":
    sys.exit(main())
