"""``shadowkv serve --data-parallel-size N`` whose routing can be changed while it runs, to compare routings.

The first argument is a file with the name of a routing, and the others are the server's. ``prefix`` is the server's own
rule. With ``random`` each request goes to any engine, and with ``one`` all go to the first.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path

from shadowkv.engine.process.prefix_table import PrefixTable
from shadowkv.serve.__main__ import main
from shadowkv.serve.start import start_replicas

ROUTINGS = ("prefix", "random", "one")


class RoutedTable(PrefixTable):
    """Chooses engines by the routing that the file names at the time."""

    def __init__(self, file: Path, margin: int) -> None:
        super().__init__(margin)
        self._file, self._draw = file, random.Random(0)

    def choose(self, prefix: Sequence[Hashable], loads: Mapping[str, int]) -> str:
        routing = self._file.read_text(encoding="utf-8")
        if routing == "prefix":
            return super().choose(prefix, loads)
        return self._draw.choice(sorted(loads)) if routing == "random" else min(loads)


if __name__ == "__main__":
    table = partial(RoutedTable, Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:], start_several=partial(start_replicas, table=table)))
