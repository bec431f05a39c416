"""Files found on disk become a tree, in any order; and copies that make room in host memory are chosen correctly."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import torch

from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.snapshots.header import SnapshotHeader, laid_out
from shadowkv.prefix_cache.copies import Copies
from shadowkv.prefix_cache.disk.header import FileHeader
from shadowkv.prefix_cache.disk_reports import DiskReports
from shadowkv.prefix_cache.eviction import Eviction
from shadowkv.prefix_cache.host import HostTier
from shadowkv.prefix_cache.page_hashes import CacheKey, PageHashes, new_uid
from shadowkv.prefix_cache.stats import Counts
from shadowkv.prefix_cache.tree import Node, PrefixTree

KEY = CacheKey("model", None, None, "float32", {}, {}, "dense")
FORM = 64 * "a"


def header(page: int) -> SnapshotHeader:
    """The header of one page of a dense sequence."""
    fields, nbytes = laid_out([("tail", (2, PAGE, 1, 1), torch.float32)])
    start = PAGE * page
    return SnapshotHeader(FORM, start, start + PAGE, (), PAGE, False, fields, 1, nbytes)


def kept(tree: PrefixTree, slabs: int) -> Copies:
    host = HostTier(slabs * 64, torch.device("cpu"), 64)
    return Copies(tree, host, Counts(), Eviction(), lambda header: (header.nbytes,))


def file_of(
    header: SnapshotHeader, hashes: PageHashes, name: str, uid: str, parent: FileHeader | None = None
) -> FileHeader:
    """The file header of a snapshot with this header, of pages with these hashes."""
    return FileHeader(
        name=name,
        origin=hashes.origin,
        parent=parent.name if parent else "",
        uid=uid,
        parent_uid=parent.uid if parent else "",
        start=header.start,
        length=header.length,
        layers=1,
        layer_bytes=header.layer_bytes,
        contents=asdict(header),
        key=KEY.digest,
        facts=KEY.facts,
        created=0,
    )


def copied(tree: PrefixTree) -> set[Node]:
    """Nodes that have a copy."""
    return {node for node in tree if node.copy is not None}


def test_a_chain_of_any_length_is_found_from_its_end() -> None:
    """As many turns as an agent takes in a day."""
    pages = 3000
    hashes = PageHashes(KEY.origin()).extend_to(list(range(PAGE * pages)))
    files: list[FileHeader] = []
    for page in range(pages):
        files.append(file_of(header(page), hashes, hashes[page], new_uid(), files[-1] if files else None))

    def token_ids(file: FileHeader) -> Future[np.ndarray]:
        ids: Future[np.ndarray] = Future()
        ids.set_result(np.arange(file.start, file.length, dtype=np.uint32))
        return ids

    tree = PrefixTree()
    copies = kept(tree, 0)
    reports = DiskReports(copies, FORM)
    reports.disk = SimpleNamespace(key=KEY, token_ids=token_ids)
    for file in reversed(files):
        reports.report("found", file)
    reports.take()
    assert len(copies.by_uid) == pages
    assert max(end for _, end in tree.along(hashes)) == pages
    reports.report("lost", files[-1])
    reports.take()
    assert len(copies.by_uid) == pages - 1 == len(tree)


def test_a_file_of_other_pages_is_not_a_nodes_copy() -> None:
    """A node that has lost its copy may be cut or grow before it is copied again, and keeps its uid."""
    tree = PrefixTree()
    copies = kept(tree, 0)
    reports = DiskReports(copies, FORM)
    reports.disk = SimpleNamespace(key=KEY)
    hashes = PageHashes(KEY.origin()).extend_to(list(range(2 * PAGE)))
    node = tree.plant(None, 0, hashes[:1], False, hashes.origin)
    copies.add(node, header(0), np.zeros(PAGE, np.uint32), users=1)
    for kind, name, wanted in (("found", 1, None), ("stored", 0, 0), ("lost", 1, 0), ("evicted", 0, None)):
        file = replace(file_of(header(0), hashes, hashes[name], node.uid), length=PAGE * (name + 1))
        reports.report(kind, file)
        reports.take()
        copy = node.copy
        assert copy is not None
        assert (copy.file and copy.file.name) == (None if wanted is None else hashes[wanted])
    assert copy.evicted


def test_nothing_makes_room_in_host_memory_in_vain() -> None:
    tree = PrefixTree()
    copies = kept(tree, 4)
    hashes = PageHashes(KEY.origin()).extend_to(list(range(4 * PAGE)))
    nodes = [tree.plant(None, 0, [page], False, hashes.origin) for page in hashes]
    for node in nodes:
        copy = copies.add(node, header(0), np.zeros(PAGE, np.uint32))
        copy.slabs, copy.ready = copies.room(64), True
        copies.eviction.touch(node)
    nodes[0].copy.users = 1
    assert copies.room(4 * 64) is None
    assert copied(tree) == set(nodes), "three of them would not have been enough"
    copies.eviction.touch(nodes[1])
    assert len(copies.room(2 * 64)) == 2
    assert copied(tree) == {nodes[0], nodes[1]}, "least recently used first"
