"""What tests do to the tiers of an engine's prefix cache, and what must hold of them."""

from __future__ import annotations

import time

from shadowkv.engine.engine import Engine

MAX_SECONDS = 120.0


def settle(engine: Engine) -> None:
    """Until nothing is on its way to another tier."""
    deadline = time.monotonic() + MAX_SECONDS
    while engine.settling:
        engine.step()
        assert time.monotonic() < deadline, "the tiers do not come to rest"


def evict_device(engine: Engine) -> None:
    """Evicts all that is kept on the device."""
    while engine.scheduler.prefix_cache.evict():
        pass


def assert_all_returned(engine: Engine) -> None:
    """What the prefix cache keeps on the device is all that is not free."""
    evict_device(engine)
    assert engine.cache.free == engine.cache.total


def evict_host(engine: Engine, count: int = 10**9) -> None:
    """Drops up to so many copies in host memory that nobody uses."""
    cache = engine.scheduler.prefix_cache
    for copy in [node.copy for node in cache._tree]:
        if count and copy is not None and copy.slabs is not None and not copy.users:
            cache.lower.copies.evict(copy)
            count -= 1


def assert_consistent(engine: Engine) -> None:
    """Slabs belong to one copy each, copies to nodes of the tree, and uses are counted."""
    cache = engine.scheduler.prefix_cache
    lower, tree = cache.lower, cache._tree
    nodes = list(tree)
    copies = [node.copy for node in nodes if node.copy is not None]
    assert all(node.copy is None or node.copy.node is node for node in nodes)
    assert set(lower.copies.by_uid.values()) <= set(copies)
    slabs = [slab for copy in copies for slab in copy.slabs or ()]
    host = lower.copies.host
    assert sorted(slabs + host._free) == list(range(host.num_slabs))
    in_flight = [] if lower.offload.job is None else [lower.offload.job.copy]
    arriving = [copy for chain in lower.chains.arriving for copy in chain.copies]
    for node in nodes:
        assert node.holders or node.children or node.copy
        assert node.parent is None or (node in node.parent.children and node.parent in nodes)
        assert all(end <= node.end and node in tree.path_of(sequence) for sequence, end in node.holders.items())
        if (copy := node.copy) is not None:
            uses = bool(copy.fetching) + bool(copy.writing) + in_flight.count(copy) + arriving.count(copy)
            assert copy.users == uses + cache._lookups.uses[copy]
            assert copy.header.length == 64 * node.end
    for sequence, path in tree._paths.items():
        assert all(sequence in node.holders for node in path)
    held = sum(host.slabs_of(copy.nbytes) for copy in cache._lookups.uses)
    assert 2 * held <= host.num_slabs
    assert set(cache._lookups._found) <= {request.prompt for request in engine.scheduler.waiting}


def assert_nothing_left(engine: Engine) -> None:
    """To be called when all requests are answered, and the tiers have come to rest."""
    assert_all_returned(engine)
    evict_host(engine)
    lower = engine.scheduler.prefix_cache.lower
    assert lower.copies.host.used_bytes == 0
    assert not engine.settling
    assert_consistent(engine)
