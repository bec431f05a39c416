"""Small snapshots, made up, and the tiers that keep them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from shadowkv.prefix_cache.disk.head import Head
from shadowkv.prefix_cache.disk.index import Entry
from shadowkv.prefix_cache.disk.tier import DiskTier
from shadowkv.prefix_cache.page_names import CacheKey, page_names, snapshot_name

KEY = CacheKey(
    model="blake2b:0a1b",
    adapter=None,
    quantization="fp8",
    dtype="bfloat16",
    spec={"keys": "latents", "rank": 160},
    codecs={"latent8": 1, "value3": 2},
    prefill="sparse",
    tensor_parallel_size=2,
    tensor_parallel_rank=1,
)
LAYERS, LAYER_BYTES = 3, 1000
LIMIT = 10**9
PATIENCE = 120.0
"""Seconds in which a disk of a busy machine has done what is asked of it: a test that passes never waits so long."""


def prompt(seed: int, length: int = 200) -> np.ndarray:
    """Token ids of a prompt."""
    return np.random.default_rng(seed).integers(0, 128_256, length, dtype=np.int64)


def data_of(head: Head) -> bytes:
    """What a snapshot's layers hold: something that its uid decides."""
    return np.random.default_rng(int(head.uid, 16)).bytes(head.nbytes)


def head_of(
    ids: np.ndarray, parent: Head | None = None, *, key: CacheKey = KEY, salt: str | None = None, **others: Any
) -> Head:
    """The head of a snapshot of all these tokens, or of those behind its parent's."""
    given = {"layers": LAYERS, "layer_bytes": LAYER_BYTES, "header": {"form": "f00d", "start": 0}} | others
    if parent is not None:
        given |= {"parent": parent.name, "parent_uid": parent.uid}
    start = 0 if parent is None else parent.length
    name = snapshot_name(key.digest, salt, ids)
    return Head.new(key, name=name, origin=key.origin(salt), start=start, length=len(ids), **given)


def names_of(ids: np.ndarray, key: CacheKey = KEY, salt: str | None = None) -> list[str]:
    """Names of a prompt's prefixes, shortest first."""
    return [name for _, name in page_names(key.origin(salt), ids)]


def found(tier: DiskTier, names: list[str]) -> list[Entry]:
    """The longest of these snapshots that is there with all that it continues, itself last."""
    for name in reversed(names):
        chain = [tier.lookup(name)]
        while chain[0] is not None and chain[0].head.parent:
            parent = tier.lookup(chain[0].head.parent)
            fits = parent is not None and parent.head.uid == chain[0].head.parent_uid
            chain.insert(0, parent if fits else None)
        if chain[0] is not None:
            return chain
    return []


def put(tier: DiskTier, ids: np.ndarray, parent: Head | None = None, **others: Any) -> Head:
    """Stores a snapshot and waits until it is there."""
    head = head_of(ids, parent, **others)
    assert tier.put(head, ids[head.start :], [data_of(head)]).result(PATIENCE)
    return head


def keep(tier: DiskTier, name: str, head: Head, tokens: int | None = None) -> None:
    """Saves all that leads to a snapshot under a name."""
    tier.keep(name, tokens or head.length, tier.chain(head.name)).result(PATIENCE)


def read(tier: DiskTier, entry: Entry, ids: np.ndarray) -> bytes:
    """The data of an entry."""
    buffers = [bytearray(700), bytearray(entry.head.nbytes - 700)]
    tier.read(entry, buffers, ids[entry.head.start : entry.head.length]).result(PATIENCE)
    return b"".join(buffers)


@contextmanager
def opened(directory: Path, limit: int = LIMIT, key: CacheKey = KEY, **others: Any) -> Iterator[DiskTier]:
    """A tier whose directory is known; it ends without leaving a thread."""
    tier = DiskTier(directory, limit, key, **{"watch_seconds": 0.05, **others})
    try:
        assert tier.wait_scanned(PATIENCE)
        yield tier
    finally:
        assert tier.close(PATIENCE)
