"""What tests do to the tiers of an engine's prefix cache, and what must hold of them."""

from __future__ import annotations

import time

from shadowkv.engine.engine import Engine

MOST_SECONDS = 120.0


def settle(engine: Engine) -> None:
    """Until nothing is on its way to another tier."""
    deadline = time.monotonic() + MOST_SECONDS
    while engine.settling:
        engine.step()
        assert time.monotonic() < deadline, "the tiers do not come to rest"


def evict_device(engine: Engine) -> None:
    """Evicts all that is kept on the device."""
    while engine.scheduler.prefix_cache.evict():
        pass


def evict_host(engine: Engine, count: int = 10**9) -> None:
    """Drops up to so many copies in host memory that nobody uses."""
    lower = engine.scheduler.prefix_cache.lower
    for node in list(lower.copies.nodes):
        if count and node.copy is not None and node.copy.slabs is not None and not node.copy.users:
            lower.copies.leave_host(node)
            count -= 1


def assert_consistent(engine: Engine) -> None:
    """Slabs belong to one copy each, copies to nodes of the tree, and uses are counted."""
    cache = engine.scheduler.prefix_cache
    lower, tree = cache.lower, cache._tree
    nodes = list(tree)
    assert all(node.copy is not None for node in lower.copies.nodes)
    assert {node for node in nodes if node.copy is not None} == lower.copies.nodes
    slabs = [slab for node in lower.copies.nodes for slab in node.copy.slabs or ()]
    host = lower.copies.host
    assert sorted(slabs + host._free) == list(range(host.num_slabs))
    at_work = [] if lower.copying.job is None else [lower.copying.job.node]
    arriving = [node for one in lower.chains.arriving for node in one[2]]
    for node in nodes:
        assert node.holders or node.children or node.copy is not None
        assert node.parent is None or (node in node.parent.children and node.parent in nodes)
        assert all(end <= node.end and node in tree.way_of(sequence) for sequence, end in node.holders.items())
        if (copy := node.copy) is not None:
            uses = bool(copy.fetching) + bool(copy.writing) + at_work.count(node) + arriving.count(node)
            assert copy.users == uses + cache._lookups.uses[node]
            assert copy.header.length == 64 * node.end
    for sequence, way in tree._ways.items():
        assert all(sequence in node.holders for node in way)
    held = sum(host.slabs_of(node.copy.header.nbytes) for node in cache._lookups.uses)
    assert 2 * held <= host.num_slabs
    assert set(cache._lookups._found) <= {request.prompt for request in engine.scheduler.waiting}


def assert_nothing_left(engine: Engine) -> None:
    """To be called when all requests are answered, and the tiers have come to rest."""
    evict_device(engine)
    evict_host(engine)
    lower = engine.scheduler.prefix_cache.lower
    assert engine.cache.free == engine.cache.total
    assert lower.copies.host.used_bytes == 0
    assert not engine.settling
    assert_consistent(engine)
