"""An index of one's own with a setting of its own, and a server that uses it.

    python examples/custom_index.py --model smollm2-135m-instruct

If an installed package has ``register`` as an entry point (``kvcache/plugins.py``), every server knows the index.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv import KVSpec
from shadowkv.cli import main as shadowkv
from shadowkv.kvcache import parts, presets
from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.memory.compressed import CompressedBatch, CompressedStore
from shadowkv.kvcache.parts.base import CompressedTokens, RankedIndex
from shadowkv.ops.page import PAGE
from shadowkv.settings import POSITIVE, setting


class SmallNorms(RankedIndex):
    """Tokens whose keys are the shortest, whatever the query: those get most attention (arXiv:2406.11430)."""

    @dataclass(frozen=True)
    class Settings:
        order: float = setting(2.0, "index", "of the norm; 1.0 sums absolute values", check=POSITIVE)

    def page_fields(self) -> tuple[Field, ...]:
        # Arrays of a page in one layer: pools, planner and admission count their bytes from here.
        return (Field("key_norms", (self.shape.num_kv_heads, PAGE), torch.float32),)

    def compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        norms = tokens.rope_keys.float().norm(self.settings.order, dim=-1)  # [L, n, 64, H], of full pages
        store.write("key_norms", tokens.layers, tokens.pages, norms.transpose(2, 3))

    def ranks(self, store: CompressedStore, layer: int, batch: CompressedBatch) -> Tensor:
        norms = store.page["key_norms"][layer][batch.pages]  # [B, P, H, 64]
        chunks = norms.transpose(1, 2).flatten(2).unflatten(-1, (-1, self.spec.chunk))
        return -chunks.amin(-1)  # [B, H, P * C]: the largest first, none above 0


def register() -> None:
    """Makes the index known (``--kv turbo:index=small-norms``), and a preset: ``small-norms:order=1.0``."""
    parts.register("index", "small-norms", SmallNorms)
    presets.register("small-norms", KVSpec(index="small-norms", chunk=1))


def main(argv: list[str]) -> int:
    """Serves; ``argv`` are further flags of ``shadowkv serve``."""
    register()
    return shadowkv(["serve", "--kv", "small-norms", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
