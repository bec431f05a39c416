"""Selection of blocks for prefill on a GPU: 8192 queries over all keys before them, by backend.

``python -m benchmarks.ops.select_blocks [--out file.json]``. ``score ms`` is the part that multiplies sampled
queries with keys, ``ms`` the whole op. Counted operations: 2 d for each pair of a sampled query and a key of the blocks
that its tile may choose. Times are medians over replays of a CUDA graph of a few calls. Scores of the last tile of two
heads are checked against float64 first.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType

import torch
from torch import Tensor

from benchmarks.ops.timing import Row, microseconds, run
from shadowkv.kvcache.spec import PREFILL_ERROR
from shadowkv.ops.select_blocks import cuda, triton
from shadowkv.ops.select_blocks.reference import BLOCK, LOCAL_BLOCKS, SAMPLED, SINK_BLOCKS

QUERIES, HEADS, GROUP, DIM = 8192, 8, 4, 128
CASES = [61440, 122880, 245760]
"""Keys."""


def backends() -> dict[str, ModuleType]:
    """The available backends, by name."""
    return {"triton": triton} | ({"cuda": cuda} if cuda.available() else {})


def verify(scores: Tensor, q: Tensor, k: Tensor, sampled: Tensor) -> None:
    """Raises if scores of the last tile of the first or the last query head are not those of float64."""
    end = (len(k) - BLOCK) // BLOCK - LOCAL_BLOCKS + 1
    together = triton.tiles_together(GROUP)
    tile = (QUERIES // BLOCK - 1) % together
    for head in (0, HEADS * GROUP - 1):
        keys = k[SINK_BLOCKS * BLOCK : end * BLOCK, head // GROUP].double()
        products = q[sampled[head, -1].long(), head].double() @ keys.T / math.sqrt(DIM)
        exact = products.unflatten(1, (-1, BLOCK)).logsumexp(2) / math.log(2)
        first = (tile * GROUP + head % GROUP) * SAMPLED
        found = scores[SINK_BLOCKS:end, head // GROUP, -1, first : first + SAMPLED]
        torch.testing.assert_close(found.T.double(), exact, atol=2e-3, rtol=0)


def measure(keys: int) -> list[Row]:
    """A row of the table for each backend."""
    q = torch.randn(QUERIES, HEADS * GROUP, DIM, device="cuda").bfloat16()
    k = torch.randn(keys, HEADS, DIM, device="cuda").bfloat16()
    sampled, scores = triton.sample_queries(q), triton.score_buffer(q, k)
    free = [(keys - QUERIES) // BLOCK + tile - LOCAL_BLOCKS + 1 - SINK_BLOCKS for tile in range(QUERIES // BLOCK)]
    operations = 2 * DIM * BLOCK * SAMPLED * HEADS * GROUP * sum(free)
    table: list[Row] = []
    for name, backend in backends().items():
        scores.fill_(math.nan)
        backend.score_blocks(q, k, sampled, scores)
        verify(scores, q, k, sampled)
        scored = microseconds([lambda backend=backend: backend.score_blocks(q, k, sampled, scores)] * 3, rounds=7)
        whole = microseconds([lambda backend=backend: backend.select_blocks(q, k, PREFILL_ERROR)] * 3, rounds=7)
        row: Row = {
            "backend": name, "queries": QUERIES, "keys": keys, "kv heads": HEADS, "group": GROUP, "dim": DIM,
            "ms": round(whole / 1e3, 3), "score ms": round(scored / 1e3, 3),
            "TFLOP/s": round(operations / scored / 1e6),
        }  # fmt: skip
        table.append(row)
    return table


if __name__ == "__main__":
    sys.exit(run(__doc__, torch.cuda.is_available(), CASES, measure))
