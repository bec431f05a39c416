"""``shadowkv serve --data-parallel-size N`` whose routing can be changed while it runs, to compare routings.

The first argument is a file with the name of a routing, and the others are the server's. ``prefix`` is the server's own
rule. With ``random`` each request goes to any engine, and with ``one`` all go to the first.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

from shadowkv.engine.process.prefix_table import PrefixTable
from shadowkv.serve.__main__ import main

ROUTINGS = ("prefix", "random", "one")


def follow(file: Path) -> None:
    """Makes all prefix tables of this process follow the file."""
    by_prefix, draw = PrefixTable.choose, random.Random(0)

    def choose(table: PrefixTable, prefix: Sequence[Hashable], loads: Mapping[str, int]) -> str:
        routing = file.read_text(encoding="utf-8")
        if routing == "prefix":
            return by_prefix(table, prefix, loads)
        return draw.choice(sorted(loads)) if routing == "random" else min(loads)

    PrefixTable.choose = choose  # type: ignore[method-assign]


if __name__ == "__main__":
    follow(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
