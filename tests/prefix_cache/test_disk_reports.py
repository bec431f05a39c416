"""What is found on disk becomes a tree, in whatever order it is found; and room in host memory is made with care."""

from __future__ import annotations

import json
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import torch

from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.snapshots.header import SnapshotHeader, laid_out
from shadowkv.prefix_cache.copies.copy import Copies
from shadowkv.prefix_cache.copies.disk_reports import DiskReports
from shadowkv.prefix_cache.copies.host import HostTier
from shadowkv.prefix_cache.device.eviction import Eviction
from shadowkv.prefix_cache.device.tree import PrefixTree
from shadowkv.prefix_cache.disk.head import Head
from shadowkv.prefix_cache.disk.index import Entry
from shadowkv.prefix_cache.page_names import CacheKey, PageNames
from shadowkv.prefix_cache.stats import TierCounts

KEY = CacheKey("model", None, None, "float32", {}, {}, "dense")
FORM = 64 * "a"


def header(page: int) -> SnapshotHeader:
    """Of one page of a dense sequence."""
    fields, nbytes = laid_out([("tail", (2, PAGE, 1, 1), torch.float32)])
    start = PAGE * page
    return SnapshotHeader(FORM, start, start + PAGE, (), PAGE, False, fields, 1, nbytes)


def kept(tree: PrefixTree, slabs: int) -> Copies:
    return Copies(tree, HostTier(slabs * 64, torch.device("cpu"), 64), TierCounts(), Eviction())


def test_a_chain_of_any_length_is_found_from_its_end() -> None:
    """As many turns as an agent takes in a day."""
    pages = 3000
    names = PageNames(KEY.origin()).extend_to(list(range(PAGE * pages)))
    entries: list[Entry] = []
    for page in range(pages):
        one, parent = header(page), entries[-1].head if entries else None
        head = Head.new(
            KEY,
            name=names[page],
            origin=names.origin,
            start=one.start,
            length=one.length,
            layers=1,
            layer_bytes=one.layer_bytes,
            header=json.loads(one.to_json()),
            parent=parent.name if parent else "",
            parent_uid=parent.uid if parent else "",
        )
        entries.append(Entry(head, 1000, 0.0))

    def token_ids(entry: Entry) -> Future[np.ndarray]:
        ids: Future[np.ndarray] = Future()
        ids.set_result(np.arange(entry.head.start, entry.head.length, dtype=np.uint32))
        return ids

    tree = PrefixTree()
    copies = kept(tree, 0)
    reports = DiskReports(tree, copies, FORM)
    reports.disk = SimpleNamespace(key=KEY, token_ids=token_ids)
    for entry in reversed(entries):
        reports.report("found", entry)
    reports.take()
    assert len(copies.of) == pages
    assert max(end for _, end in tree.along(names)) == pages
    reports.report("lost", entries[-1])
    reports.take()
    assert len(copies.of) == pages - 1 == len(tree)


def test_a_file_of_other_pages_is_not_a_nodes_copy() -> None:
    """A node that has lost its copy may be cut or grow before it is copied again, and keeps its uid."""
    tree = PrefixTree()
    copies = kept(tree, 0)
    reports = DiskReports(tree, copies, FORM)
    reports.disk = SimpleNamespace(key=KEY)
    names = PageNames(KEY.origin()).extend_to(list(range(2 * PAGE)))
    node = tree.plant(None, 0, names[:1], False, names.origin)
    copies.add(node, header(0), np.zeros(PAGE, np.uint32), users=1)
    for kind, name, wanted in (("found", 1, None), ("stored", 0, 0), ("lost", 1, 0), ("evicted", 0, None)):
        head = Head.new(
            KEY,
            name=names[name],
            origin=names.origin,
            start=0,
            length=PAGE * (name + 1),
            layers=1,
            layer_bytes=header(0).layer_bytes,
            header=json.loads(header(0).to_json()),
            uid=node.uid,
        )
        reports.report(kind, Entry(head, 1000, 0.0))
        reports.take()
        copy = copies.of[node]
        assert (copy.entry and copy.entry.name) == (None if wanted is None else names[wanted])
    assert copy.evicted


def test_nothing_makes_room_in_host_memory_in_vain() -> None:
    tree = PrefixTree()
    copies = kept(tree, 4)
    names = PageNames(KEY.origin()).extend_to(list(range(4 * PAGE)))
    nodes = [tree.plant(None, 0, [name], False, names.origin) for name in names]
    for node in nodes:
        copy = copies.add(node, header(0), np.zeros(PAGE, np.uint32))
        copy.slabs, copy.ready = copies.room(64), True
        copies.eviction.touch(node)
    copies.of[nodes[0]].users = 1
    assert copies.room(4 * 64) is None
    assert copies.of.keys() == set(nodes), "three of them would not have been enough"
    copies.eviction.touch(nodes[1])
    assert len(copies.room(2 * 64)) == 2
    assert copies.of.keys() == {nodes[0], nodes[1]}, "least recently used first"
