"""Reads a snapshot from a disk with a cold page cache, beside plain reads of the same file; times in GiB/s."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shadowkv.prefix_cache.disk.files import READ_BLOCK, SnapshotFile, write_snapshot
from shadowkv.prefix_cache.disk.head import Head
from shadowkv.prefix_cache.disk.workers import Workers
from shadowkv.prefix_cache.page_names import CacheKey, snapshot_name

LAYERS = 32
TOKENS = 4096


def drop_from_cache(path: Path) -> None:
    """Drops a file's pages from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def read_plainly(path: Path, buffer: memoryview) -> None:
    """Reads a file's data from front to end."""
    with path.open("rb", buffering=0) as file:
        begin = 0
        while count := file.readinto(buffer[begin : begin + READ_BLOCK]):
            begin += count


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--dir", type=Path, required=True, help="on the disk in question; a file is made there and removed"
    )
    parser.add_argument("--gib", type=float, default=1.0, help="size of the file (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="of each way, taken in turn (default: %(default)s)")
    args = parser.parse_args()

    key = CacheKey("bench", None, None, "bfloat16", {}, {}, "dense")
    ids = np.arange(TOKENS)
    name, width = snapshot_name(key.digest, None, ids), int(args.gib * 2**30 / LAYERS)
    origin = key.origin()
    head = Head.new(key, name=name, origin=origin, start=0, length=TOKENS, layers=LAYERS, layer_bytes=width, header={})
    slab = np.random.default_rng(0).integers(0, 256, width, np.uint8)
    buffer = np.ones(head.file_bytes, np.uint8)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        begin = time.perf_counter()
        write_snapshot(Path(folder), head, ids, [slab] * LAYERS)
        print(f"written and synced: {args.gib / (time.perf_counter() - begin):.2f}")
        path = Path(folder) / head.file_name

        def read_snapshot(readers: Workers | None) -> None:
            with SnapshotFile(Path(folder), name) as file:
                file.expect(ids)
                file.read_into([buffer[: head.nbytes]], readers)

        ways: dict[str, Callable[[], None]] = {"plain": lambda: read_plainly(path, memoryview(buffer))}
        ways["tier, no reader"] = lambda: read_snapshot(None)
        for count in (1, 2, 4, 8):
            readers = Workers(count, "read")
            ways[f"tier, {count} readers"] = lambda readers=readers: read_snapshot(readers)
        speeds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(args.rounds):
            for way, read in ways.items():
                drop_from_cache(path)
                begin = time.perf_counter()
                read()
                speeds[way].append(head.nbytes / 2**30 / (time.perf_counter() - begin))
        for way, found in speeds.items():
            print(f"{way:16} median {statistics.median(found):.2f}, {min(found):.2f} to {max(found):.2f}")


if __name__ == "__main__":
    main()
