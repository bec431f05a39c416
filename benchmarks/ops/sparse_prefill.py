"""Both parts of a sparse prefill on a GPU, by backend: selecting blocks, and attending to listed blocks. 8192 queries
go over all keys before them.

Counted operations of the selection are 2 * d for each pair of a sampled query and a key of the blocks that the query's
tile may select (d dimensions of a head). Counted operations of attention are 4 * d for each pair of a query and a key
of the listed blocks, including masked keys. Before timing, the last tile of the first and of the last query head is
checked.
"""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor

from benchmarks.ops.timing import Row, bench, microseconds
from shadowkv.kvcache.policy.spec import PREFILL_ERROR
from shadowkv.ops.attend_blocks import cuda_sm90 as attend_cuda
from shadowkv.ops.attend_blocks import reference
from shadowkv.ops.attend_blocks import triton as attend_triton
from shadowkv.ops.select_blocks import cuda_sm90 as select_cuda
from shadowkv.ops.select_blocks import triton as select_triton
from shadowkv.ops.select_blocks.reference import BLOCK, LOCAL_BLOCKS, SAMPLED, SINK_BLOCKS, Blocks

QUERIES, HEADS, GROUP, DIM = 8192, 8, 4, 128
CHECKED_HEADS = (0, HEADS * GROUP - 1)
KEYS = (61440, 122880, 245760)
LISTS = [(keys, density) for keys in KEYS for density in (0.05, 0.1, 0.2, 1.0)]
"""Number of keys, and the share of the blocks up to a tile that the tile attends to."""


def backends(triton: ModuleType, cuda: ModuleType) -> dict[str, ModuleType]:
    """Returns the available backends of an op, by name."""
    return {"triton": triton} | ({"cuda": cuda} if not cuda.missing() else {})


def check_scores(scores: Tensor, q: Tensor, k: Tensor, sampled: Tensor) -> None:
    """Raises an error if scores differ from those computed in float64."""
    end = (len(k) - BLOCK) // BLOCK - LOCAL_BLOCKS + 1
    tile = (QUERIES // BLOCK - 1) % select_triton.tiles_together(GROUP)
    for head in CHECKED_HEADS:
        keys = k[SINK_BLOCKS * BLOCK : end * BLOCK, head // GROUP].double()
        products = q[sampled[head, -1].long(), head].double() @ keys.T / math.sqrt(DIM)
        exact = products.unflatten(1, (-1, BLOCK)).logsumexp(2) / math.log(2)
        first = (tile * GROUP + head % GROUP) * SAMPLED
        own = scores[SINK_BLOCKS:end, head // GROUP, -1, first : first + SAMPLED]
        torch.testing.assert_close(own.T.double(), exact, atol=2e-3, rtol=0)


@bench(KEYS)
def select_blocks(keys: int) -> list[Row]:
    """A row for each backend. ``ms`` is the time of the whole op, and ``score ms`` that of multiplying sampled queries
    with keys."""
    q = torch.randn(QUERIES, HEADS * GROUP, DIM, device="cuda").bfloat16()
    k = torch.randn(keys, HEADS, DIM, device="cuda").bfloat16()
    sampled, scores = select_triton.sample_queries(q), select_triton.score_buffer(q, k)
    free = [(keys - QUERIES) // BLOCK + tile - LOCAL_BLOCKS + 1 - SINK_BLOCKS for tile in range(QUERIES // BLOCK)]
    operations = 2 * DIM * BLOCK * SAMPLED * HEADS * GROUP * sum(free)
    table: list[Row] = []
    for name, backend in backends(select_triton, select_cuda).items():
        scores.fill_(math.nan)
        backend.score_blocks(q, k, sampled, scores)
        check_scores(scores, q, k, sampled)
        scored = microseconds([lambda backend=backend: backend.score_blocks(q, k, sampled, scores)] * 3, rounds=7)
        taken = microseconds([lambda backend=backend: backend.select_blocks(q, k, PREFILL_ERROR)] * 3, rounds=7)
        row: Row = {
            "backend": name, "queries": QUERIES, "keys": keys, "kv heads": HEADS, "group": GROUP, "dim": DIM,
            "ms": round(taken / 1e3, 3), "score ms": round(scored / 1e3, 3),
            "TFLOP/s": round(operations / scored / 1e6),
        }  # fmt: skip
        table.append(row)
    return table


def lists(keys: int, density: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns lists of random blocks, their counts and their weights, different for every tile of every query head.
    Every list has the first two blocks, the last four before the tile, and the tile's own block."""
    tiles, blocks = QUERIES // BLOCK, keys // BLOCK
    own = (keys - QUERIES) // BLOCK + torch.arange(tiles, device="cuda")[:, None]
    block = torch.arange(blocks, device="cuda")
    chosen = torch.rand(HEADS * GROUP, tiles, blocks, device="cuda") < density
    chosen |= (block < SINK_BLOCKS) | (block >= own - LOCAL_BLOCKS)
    chosen &= block <= own
    indices = chosen.int().sort(dim=-1, descending=True, stable=True)[1]
    weights = torch.where((indices < SINK_BLOCKS) | (indices >= own - LOCAL_BLOCKS), 1.0, 2.0)
    return indices.int(), chosen.sum(-1).int(), weights


def check_attention(out: Tensor, q: Tensor, k: Tensor, v: Tensor, blocks: Blocks) -> None:
    """Raises an error if the output differs from the reference's."""
    for head in CHECKED_HEADS:
        of, shared = slice(head, head + 1), slice(head // GROUP, head // GROUP + 1)
        listed = (x[of, -1:] for x in blocks)
        exact = reference.attend_blocks(q[-BLOCK:, of], k[:, shared], v[:, shared], *listed)
        torch.testing.assert_close(out[-BLOCK:, of].float(), exact.float(), atol=5e-4, rtol=0.02)


@bench(LISTS)
def attend_blocks(case: tuple[int, float]) -> list[Row]:
    """A row for each backend."""
    keys, density = case
    q = torch.randn(QUERIES, HEADS * GROUP, DIM, device="cuda").bfloat16()
    k, v = torch.randn(2, keys, HEADS, DIM, device="cuda").bfloat16()
    blocks = lists(keys, density)
    operations = 4 * DIM * BLOCK * BLOCK * int(blocks[1].sum())
    table: list[Row] = []
    for name, backend in backends(attend_triton, attend_cuda).items():
        check_attention(backend.attend_blocks(q, k, v, *blocks)[0], q, k, v, blocks)
        taken = microseconds([lambda backend=backend: backend.attend_blocks(q, k, v, *blocks)] * 3, rounds=7)
        row: Row = {
            "backend": name, "queries": QUERIES, "keys": keys, "density": density, "kv heads": HEADS, "group": GROUP,
            "dim": DIM, "ms": round(taken / 1e3, 3), "TFLOP/s": round(operations / taken / 1e6),
        }  # fmt: skip
        table.append(row)
    return table
