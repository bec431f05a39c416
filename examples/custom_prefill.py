"""A prefill strategy of one's own with a setting of its own, and a server that uses it.

python examples/custom_prefill.py --model smollm2-135m-instruct
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from torch import Tensor

from shadowkv.cli import main as shadowkv
from shadowkv.kvcache import parts
from shadowkv.kvcache.parts.base import PrefillStrategy
from shadowkv.ops.registry import Ops
from shadowkv.settings import at_least, setting


class Nearby(PrefillStrategy):
    """Tokens of a long prompt attend to the newest tokens before them alone, except for its last tokens."""

    ops = ("dense_attention.windowed",)  # an engine chooses backends for what its parts name

    @dataclass(frozen=True)
    class Settings:
        width: int = setting(4096, "prefill", "tokens that a token attends to", check=at_least(1))

    def pays(self, new: int, keys: int) -> bool:
        return keys > self.settings.width  # below, attention is exact

    def attend(
        self, ops: Ops, layer: int, q: Tensor, k: Tensor, v: Tensor, to_come: int, sinks: Tensor | None = None
    ) -> Tensor:
        width = self.settings.width if to_come else len(k)  # the block of a prompt's last tokens attends to all
        seen = len(q) + width
        return ops.dense_attention(q, k[-seen:], v[-seen:], window=width, sinks=sinks)


def register() -> None:
    """Makes ``--prefill nearby`` known, and ``--kv turbo:prefill=nearby,width=1024``."""
    parts.register("prefill", "nearby", Nearby)


def main(argv: list[str]) -> int:
    """Serves; ``argv`` are further flags of ``shadowkv serve``."""
    register()
    return shadowkv(["serve", "--prefill", "nearby", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
