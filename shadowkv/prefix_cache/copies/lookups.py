"""Matches of waiting prompts: looked up again when something has changed, and held in host memory."""

from __future__ import annotations

import time
from collections import Counter

from shadowkv.prefix_cache.copies.kept_copies import KeptCopies
from shadowkv.prefix_cache.device.matches import Match, Prompt
from shadowkv.prefix_cache.device.tree import Node


class Lookups:
    """Matches by prompt, kept until the prompt is forgotten.

    What a prompt is to be restored from counts as in use and stays in host memory, as long as all that is held this way
    fits in half of it. The rest is for what others fetch, and for what is computed.

    Attributes:
        uses: number of prompts that hold a node's copy.
    """

    def __init__(self) -> None:
        self._found: dict[Prompt, tuple[Match | None, int]] = {}
        self._held: dict[Prompt, tuple[Node, ...]] = {}
        self.uses: Counter[Node] = Counter()

    def current(self, prompt: Prompt, changes: int) -> bool:
        """Whether a prompt's recorded match still holds: nothing has changed since, and what is on its way from the
        disk is not late."""
        match, then = self._found.get(prompt, (None, -1))
        return then == changes and (match is None or match.ready or time.monotonic() <= match.until)

    def match(self, prompt: Prompt) -> Match | None:
        """The match recorded for a prompt."""
        return self._found[prompt][0]

    def note(self, prompt: Prompt, match: Match | None, changes: int) -> None:
        """Records a match."""
        self._found[prompt] = match, changes

    def hold(self, prompt: Prompt, match: Match | None, copies: KeptCopies) -> None:
        """Holds what a match restores, replacing what was held for the prompt."""
        held, nodes = self._held.get(prompt, ()), tuple(step.node for step in match.steps) if match else ()
        if nodes == held:
            return
        if not self._fit(nodes, copies):
            nodes = ()
        for node in nodes:
            assert node.copy is not None
            node.copy.users += 1
        self.uses.update(nodes)
        self._let_go(held, copies)
        self._held[prompt] = nodes

    def _fit(self, nodes: tuple[Node, ...], copies: KeptCopies) -> bool:
        """Whether these may be held as well."""
        slabs = (copies.host.slabs_of(node.copy.header.nbytes) for node in {*self.uses, *nodes} if node.copy)
        return 2 * sum(slabs) <= copies.host.num_slabs

    def _let_go(self, nodes: tuple[Node, ...], copies: KeptCopies | None) -> None:
        for node in nodes:
            self.uses[node] -= 1
            if not self.uses[node]:
                del self.uses[node]
            if copies is not None:
                copies.leave(node)

    def forget(self, prompt: Prompt, copies: KeptCopies | None) -> None:
        """Drops a prompt that is no longer waiting."""
        self._found.pop(prompt, None)
        self._let_go(self._held.pop(prompt, ()), copies)
