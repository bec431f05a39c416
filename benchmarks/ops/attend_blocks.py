"""Prefill attention over listed blocks on a GPU: 8192 queries over a share of the blocks up to them, by backend.

``python -m benchmarks.ops.attend_blocks [--out file.json]``. Lists are random, different for each tile and query
head; the first two blocks, the last four and a tile's own are in all of them. Counted operations: 4 d for each pair of
a query and a key of the listed blocks, including masked ones. Times are medians over replays of a CUDA graph of a few
calls. The last tile of two heads is checked against the reference first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.ops.timing import Row, microseconds, run
from shadowkv.ops.attend_blocks import cuda, reference, triton
from shadowkv.ops.select_blocks.reference import BLOCK, LOCAL_BLOCKS, SINK_BLOCKS, Blocks

QUERIES, HEADS, GROUP, DIM = 8192, 8, 4, 128
CASES = [(keys, density) for keys in (61440, 122880, 245760) for density in (0.05, 0.1, 0.2, 1.0)]
"""Keys, and the share of blocks up to a tile that the tile attends to."""


def backends() -> dict[str, Callable[..., Tensor]]:
    """The available backends, by name."""
    found = {"triton": triton.attend_blocks}
    return found | ({"cuda": cuda.attend_blocks} if cuda.available() else {})


def lists(keys: int, density: float) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks, their counts and weights, for every tile of every query head."""
    tiles, blocks = QUERIES // BLOCK, keys // BLOCK
    own = (keys - QUERIES) // BLOCK + torch.arange(tiles, device="cuda")[:, None]
    block = torch.arange(blocks, device="cuda")
    chosen = torch.rand(HEADS * GROUP, tiles, blocks, device="cuda") < density
    chosen |= (block < SINK_BLOCKS) | (block >= own - LOCAL_BLOCKS)
    chosen &= block <= own
    indices = chosen.int().sort(dim=-1, descending=True, stable=True)[1]
    weights = torch.where((indices < SINK_BLOCKS) | (indices >= own - LOCAL_BLOCKS), 1.0, 2.0)
    return indices.int(), chosen.sum(-1).int(), weights


def verify(out: Tensor, q: Tensor, k: Tensor, v: Tensor, blocks: Blocks) -> None:
    """Raises if the last tile of the first or the last query head differs from the reference."""
    for head in (0, HEADS * GROUP - 1):
        of, shared, tile = slice(head, head + 1), slice(head // GROUP, head // GROUP + 1), slice(-1, None)
        listed = (x[of, tile] for x in blocks)
        exact = reference.attend_blocks(q[-BLOCK:, of], k[:, shared], v[:, shared], *listed)
        torch.testing.assert_close(out[-BLOCK:, of].float(), exact.float(), atol=5e-4, rtol=0.02)


def measure(case: tuple[int, float]) -> list[Row]:
    """A row of the table for each backend."""
    keys, density = case
    q = torch.randn(QUERIES, HEADS * GROUP, DIM, device="cuda").bfloat16()
    k, v = torch.randn(2, keys, HEADS, DIM, device="cuda").bfloat16()
    blocks = lists(keys, density)
    operations = 4 * DIM * BLOCK * BLOCK * int(blocks[1].sum())
    table: list[Row] = []
    for name, attend in backends().items():
        verify(attend(q, k, v, *blocks), q, k, v, blocks)
        taken = microseconds([lambda attend=attend: attend(q, k, v, *blocks)] * 3, rounds=7)
        row: Row = {
            "backend": name, "queries": QUERIES, "keys": keys, "density": density, "kv heads": HEADS, "group": GROUP,
            "dim": DIM, "ms": round(taken / 1e3, 3), "TFLOP/s": round(operations / taken / 1e6),
        }  # fmt: skip
        table.append(row)
    return table


if __name__ == "__main__":
    sys.exit(run(__doc__, torch.cuda.is_available(), CASES, measure))
