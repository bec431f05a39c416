"""Names of pages and the tree over them, against plain comparisons of token ids."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.prefix_cache.page_hashes import PageHashes, common_pages, origin
from shadowkv.prefix_cache.tree import PrefixTree

ORIGIN = origin(40 * "0")

ends = st.sets(st.integers(1, 12), max_size=3)
"""Where nodes end before the last page."""


def hashes(pages: str) -> PageHashes:
    """Names of a prompt with a page for each letter."""
    return PageHashes(ORIGIN).extend_to([ord(letter) for letter in pages for _ in range(PAGE)])


@given(st.text("ab", max_size=6), st.text("ab", max_size=6), st.integers(0, 6))
def test_pages_in_common_are_those_of_a_common_start(one: str, other: str, grown: int) -> None:
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    first = hashes(one[:grown])
    ids = [ord(letter) for letter in one for _ in range(PAGE)]
    assert first.extend_to(ids) == hashes(one)
    assert common_pages(first, hashes(other)) == same


def test_salts_share_nothing() -> None:
    ids = list(range(3 * PAGE))
    pages = [PageHashes(origin(40 * "0", salt)).extend_to(ids) for salt in (None, "", "a", "b", "salt a")]
    assert not any(common_pages(one, other) for i, one in enumerate(pages) for other in pages[:i])


def test_a_prompt_is_followed_no_further_than_it_is_known() -> None:
    seen = 0

    class Followed(list[str]):
        def __iter__(self) -> Iterator[str]:
            nonlocal seen
            for page in super().__iter__():
                seen += 1
                yield page

    tree, held = PrefixTree(), Held()
    tree.hold(held, hashes("ab"), [2])
    assert not list(tree.along(Followed(hashes(500 * "b")))) and seen <= 2
    assert [end for _, end in tree.along(Followed(hashes("ab" + 500 * "c")))] == [2] and seen <= 6


class Tree(RuleBasedStateMachine):
    """Sequences are added, forked, extended, cut, compressed and removed. Every prompt finds its longest prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.tree, self.held = PrefixTree(), dict[Any, str]()

    def add(self, pages: str) -> Any:
        sequence = Held()
        self.held[sequence] = pages
        return sequence

    def hold(self, sequence: Any, ends: set[int]) -> None:
        """Some of ``ends`` are not among the pages."""
        pages = self.held[sequence]
        inner = sorted(end for end in ends if end < len(pages))
        before = {node for node in self.tree.path_of(sequence)}
        path = self.tree.hold(sequence, hashes(pages), [*inner, len(pages)])
        new = [node for node in path if node not in before]
        assert {node.end for node in new} >= {end for end in inner if new and end > new[0].first}

    @rule(pages=st.text("ab", max_size=8), ends=ends)
    def compute(self, pages: str, ends: set[int]) -> None:
        self.hold(self.add(pages), ends)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), more=st.text("ab", max_size=4), ends=ends)
    def fork(self, data: st.DataObject, more: str, ends: set[int]) -> None:
        parent = data.draw(st.sampled_from(list(self.held)))
        pages = self.held[parent][: data.draw(st.integers(0, len(self.held[parent])))]
        child = self.add(pages)
        child.path = parent.path
        self.tree.fork(child, parent, len(pages))
        self.held[child] = pages + more
        self.hold(child, ends)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), more=st.text("ab", max_size=4), compress=st.booleans(), ends=ends)
    def grow(self, data: st.DataObject, more: str, compress: bool, ends: set[int]) -> None:
        sequence = data.draw(st.sampled_from(list(self.held)))
        sequence.path = sequence.path or [None] * compress
        self.held[sequence] += more
        self.hold(sequence, ends)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(list(self.held)))
        left = data.draw(st.integers(0, len(self.held[sequence])))
        self.held[sequence] = self.held[sequence][:left]
        self.tree.cut(sequence, left)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(list(self.held)))
        del self.held[sequence]
        self.tree.forget(sequence)

    @rule(pages=st.text("ab", max_size=8))
    def look(self, pages: str) -> None:
        found = dict[Any, int]()
        for node, end in self.tree.along(hashes(pages)):
            for sequence, held in node.holders.items():
                found[sequence] = max(found.get(sequence, 0), min(end, held))
        for sequence, own in self.held.items():
            assert found.get(sequence, 0) == common_pages(hashes(own), hashes(pages))
        assert found.keys() <= self.held.keys()

    @invariant()
    def nothing_is_left_of_what_is_gone(self) -> None:
        assert len(self.tree) <= sum(len(pages) for pages in self.held.values())
        for node in self.tree:
            assert node.end == max([*node.holders.values(), *(child.first for child in node.children)])
        if not any(self.held.values()):
            assert not len(self.tree)


class Held(SimpleNamespace):
    """A stand-in for a sequence, with the attributes that the tree reads."""

    __hash__ = object.__hash__

    def __init__(self) -> None:
        super().__init__(path=[])

    def __eq__(self, other: object) -> bool:
        return self is other


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
