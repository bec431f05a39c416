"""Small made-up snapshots, and disk tiers for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from shadowkv.prefix_cache.disk.header import FileHeader
from shadowkv.prefix_cache.disk.tier import DiskTier
from shadowkv.prefix_cache.page_hashes import CacheKey, new_uid, origin, page_hashes

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
"""Seconds in which the disk of a busy machine finishes any job. A test that passes never waits so long."""


def prompt(seed: int, length: int = 200) -> np.ndarray:
    """Token ids of a prompt."""
    return np.random.default_rng(seed).integers(0, 128_256, length, dtype=np.int64)


def data_of(header: FileHeader) -> bytes:
    """The bytes of a snapshot's layers, which depend on its uid."""
    return np.random.default_rng(int(header.uid, 16)).bytes(header.nbytes)


def snapshot_name(key_digest: str, salt: str | None, token_ids: Any) -> str:
    """The name of the snapshot that ends with the last of a prompt's first tokens ``token_ids``."""
    return [page for _, page in page_hashes(origin(key_digest, salt), token_ids)][-1]


def header_of(
    ids: np.ndarray, parent: FileHeader | None = None, *, key: CacheKey = KEY, salt: str | None = None, **others: Any
) -> FileHeader:
    """The header of a snapshot of a prompt's tokens, or of those after its parent's."""
    given = {
        "parent": parent.name if parent else "",
        "parent_uid": parent.uid if parent else "",
        "uid": new_uid(),
        "layers": LAYERS,
        "layer_bytes": LAYER_BYTES,
        "contents": {"form": "f00d", "start": 0},
    }
    return FileHeader(
        name=snapshot_name(key.digest, salt, ids),
        origin=key.origin(salt),
        start=0 if parent is None else parent.length,
        length=len(ids),
        key=key.digest,
        facts=key.facts,
        created=int(time.time()),
        **given | others,
    )


def names_of(ids: np.ndarray, key: CacheKey = KEY, salt: str | None = None) -> list[str]:
    """Names of a prompt's prefixes, the shortest first."""
    return [page for _, page in page_hashes(key.origin(salt), ids)]


def found(tier: DiskTier, names: list[str]) -> list[FileHeader]:
    """The longest of these snapshots that exists with all its ancestors, after these."""
    for name in reversed(names):
        chain = [tier.lookup(name)]
        while chain[0] is not None and chain[0].parent:
            parent = tier.lookup(chain[0].parent)
            fits = parent is not None and parent.uid == chain[0].parent_uid
            chain.insert(0, parent if fits else None)
        if chain[0] is not None:
            return chain
    return []


def put(
    tier: DiskTier, ids: np.ndarray, parent: FileHeader | None = None, *, stored: bool = True, **others: Any
) -> FileHeader:
    """Puts a new snapshot and waits until it is stored, or refused."""
    header = header_of(ids, parent, **others)
    assert tier.put(header, ids[header.start :], [data_of(header)]).result(PATIENCE) == stored
    return header


def keep(tier: DiskTier, name: str, header: FileHeader, tokens: int | None = None) -> None:
    """Saves a snapshot and its ancestors under a name."""
    tier.keep(name, tokens or header.length, tier.chain(header.name)).result(PATIENCE)


def read(tier: DiskTier, header: FileHeader, ids: np.ndarray) -> bytes:
    """The data of a snapshot's file."""
    buffers = [bytearray(700), bytearray(header.nbytes - 700)]
    tier.read(header, buffers, ids[header.start : header.length]).result(PATIENCE)
    return b"".join(buffers)


@contextmanager
def opened(directory: Path, limit: int = LIMIT, key: CacheKey = KEY, **others: Any) -> Iterator[DiskTier]:
    """A tier whose directory has been scanned. At the end it is closed, and all its threads have ended."""
    tier = DiskTier(directory, limit, key, **{"watch_seconds": 0.05, **others})
    try:
        assert tier.wait_scanned(PATIENCE)
        yield tier
    finally:
        assert tier.close(PATIENCE)
