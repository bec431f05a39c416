"""Eviction of copies: scores of hand-made graphs, the order, and its time."""

from __future__ import annotations

import time

import pytest
import torch

from shadowkv.prefix_cache.copies import Copies
from shadowkv.prefix_cache.eviction import POLICIES, Eviction, keep_score
from shadowkv.prefix_cache.host import HostTier
from shadowkv.prefix_cache.stats import Counts
from shadowkv.prefix_cache.tree import Node, PrefixTree


class Clock:
    """A clock that shows the time to which it is set."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def tree_of(*parents: int | None) -> PrefixTree:
    """A tree with a node of one page for each number, that of its parent."""
    tree, nodes = PrefixTree(), list[Node]()
    for number, parent in enumerate(parents):
        above = None if parent is None else nodes[parent]
        nodes.append(tree.plant(above, above.end if above else 0, [str(number)], False, "origin"))
    return tree


def test_the_score_is_the_formula() -> None:
    # A system prompt with two documents behind it, one of them with a chat of one turn; and a prompt alone.
    nodes = list(tree_of(None, 0, 0, 1, None))
    for node, hits, used in zip(nodes, (14, 12, 1, 100, 2), (1000.0, 1000.0, 400.0, 900.0, 0.0), strict=True):
        node.hits, node.used = hits, used
    to_document, to_other, to_chat = 1 + 0.1 * 12, 1 + 0.1 * 1, 10  # which is the most that an edge weighs
    assert [keep_score(node, 1000.0) for node in nodes] == pytest.approx(
        [
            5 * 2 + 2 * (to_document + to_other) + 3 * 14,
            5 * 2 + 2 * (to_document + to_chat) + 3 * 12,
            5 * 1 + 2 * to_other + 3 * 1 - 0.01 * 600,
            5 * 1 + 2 * to_chat + 3 * 100 - 0.01 * 100,
            3 * 2 - 0.01 * 1000,
        ]
    )


def test_a_use_is_one_of_all_that_a_node_continues() -> None:
    clock, nodes = Clock(), list(tree_of(None, 0, 1, 0))
    eviction = Eviction("graph", clock)
    for clock.seconds, node, hits in ((1.0, nodes[2], 1), (2.0, nodes[3], 0), (3.0, nodes[1], 1)):
        eviction.touch(node, hits)
    assert [node.hits for node in nodes] == [2, 2, 1, 0]
    assert [round(node.used, 6) for node in nodes] == [3.0, 3.0, 1.0, 2.0]


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_goes_before_what_continues_it(policy: str) -> None:
    clock, nodes = Clock(), list(tree_of(None, 0, 1, 2, 2, None))
    eviction = Eviction(policy, clock)  # by a clock that stands still
    for node in nodes:
        eviction.touch(node)
    # The last of the chain has more edges, and more hits, than those that it continues.
    nodes[2].hits = 50
    order = {node: place for place, node in enumerate(eviction.order(nodes))}
    assert len(order) == len(nodes)
    assert all(order[node] < order[node.parent] for node in nodes if node.parent)


def test_lru_is_the_order_of_uses_whatever_the_tree_says() -> None:
    nodes = list(tree_of(None, None, None, 1, 1))
    for policy, wanted in (("lru", [2, 0, 4, 3, 1]), ("graph", [2, 0, 4, 3, 1])):
        clock = Clock()
        eviction = Eviction(policy, clock)
        for number in (1, 4, 2, 0, 4, 3):
            clock.seconds += 1
            eviction.touch(nodes[number])
        assert [nodes.index(node) for node in eviction.order(nodes)] == wanted
    nodes[2].hits = 1
    assert [nodes.index(node) for node in Eviction("lru", Clock()).order(nodes)] == [2, 0, 4, 3, 1]
    assert [nodes.index(node) for node in Eviction("graph", clock).order(nodes)] == [0, 2, 4, 3, 1]


def kept(policy: str, tree: PrefixTree) -> Copies:
    """A copy of one slab for each node. They fill host memory."""
    host = HostTier(len(tree), torch.device("cpu"), slab_bytes=1)
    copies = Copies(tree, host, Counts(), Eviction(policy), lambda header: (1,))
    for node in tree:
        copy = copies.add(node, None, None)  # type: ignore[arg-type]
        copy.slabs, copy.ready = host.take(1), True
        copies.eviction.touch(node)
    return copies


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_used_or_spared_stays(policy: str) -> None:
    tree = tree_of(*[None] * 6)
    nodes, copies = list(tree), kept(policy, tree)
    nodes[0].copy.users = 1
    assert copies.room(5, {nodes[2]}) is None
    assert {node for node in nodes if node.copy} == set(nodes)
    assert copies.room(4, {nodes[2]}) is not None
    assert {node for node in nodes if node.copy} == {nodes[0], nodes[2]}


@pytest.mark.parametrize("policy", POLICIES)
def test_room_among_10000_nodes_is_made_soon(policy: str) -> None:
    """Chats of five turns over documents. It takes 0.02 s; each node looked at for each other would take 10."""
    parents: list[int | None] = [None]
    for _ in range(2000):
        document = len(parents)
        parents += [0, *range(document, document + 4)]
    tree = tree_of(*parents[:10000])
    nodes, copies = list(tree), kept(policy, tree)
    for node in nodes[7::13]:
        copies.eviction.touch(node, hits=1)
    taken = []
    for _ in range(5):
        start = time.thread_time()  # others may share the machine
        assert len(copies.room(3)) == 3
        taken.append(time.thread_time() - start)
    assert min(taken) < 1
