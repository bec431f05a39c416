"""Matches of waiting prompts: looked up again when something has changed, and held in host memory."""

from __future__ import annotations

import time
from collections import Counter

from shadowkv.prefix_cache.copies.copy import Copies, Copy
from shadowkv.prefix_cache.device.matches import Match, Prompt


class Lookups:
    """Matches by prompt, kept until the prompt is forgotten.

    What a prompt is to be restored from counts as in use and stays in host memory, as long as all that is held this way
    fits in half of it. The rest is for what others fetch, and for what is computed.

    Attributes:
        uses: number of prompts that hold a copy.
    """

    def __init__(self) -> None:
        self._found: dict[Prompt, tuple[Match | None, int]] = {}
        self._held: dict[Prompt, tuple[Copy, ...]] = {}
        self.uses: Counter[Copy] = Counter()

    def current(self, prompt: Prompt, changes: int) -> bool:
        """Whether a prompt's recorded match still holds: nothing has changed since, and what is on its way from the
        disk is not late."""
        match, then = self._found.get(prompt, (None, -1))
        return then == changes and (match is None or match.ready or time.monotonic() <= match.until)

    @property
    def deferred(self) -> int:
        """Prompts that wait for what is on its way from the disk; may be read from any thread."""
        return sum(match is not None and not match.ready for match, _ in [*self._found.values()])

    def match(self, prompt: Prompt) -> Match | None:
        """The match recorded for a prompt."""
        return self._found[prompt][0]

    def note(self, prompt: Prompt, match: Match | None, changes: int) -> None:
        """Records a match."""
        self._found[prompt] = match, changes

    def hold(self, prompt: Prompt, match: Match | None, copies: Copies) -> None:
        """Holds what a match restores, replacing what was held for the prompt."""
        held = self._held.get(prompt, ())
        restored = tuple(copies.of[step.node] for step in match.steps) if match else ()
        if restored == held:
            return
        if not self._fit(restored, copies):
            restored = ()
        for copy in restored:
            copy.use()
        self.uses.update(restored)
        self._let_go(held, leave=True)
        self._held[prompt] = restored

    def _fit(self, more: tuple[Copy, ...], copies: Copies) -> bool:
        """Whether these may be held as well."""
        slabs = (copies.host.slabs_of(copy.header.nbytes) for copy in {*self.uses, *more})
        return 2 * sum(slabs) <= copies.host.num_slabs

    def _let_go(self, held: tuple[Copy, ...], leave: bool) -> None:
        for copy in held:
            self.uses[copy] -= 1
            if not self.uses[copy]:
                del self.uses[copy]
            if leave:
                copy.leave()

    def forget(self, prompt: Prompt, leave: bool) -> None:
        """Drops a prompt that is no longer waiting; where the copies are still used by others, it is to ``leave``
        them."""
        self._found.pop(prompt, None)
        self._let_go(self._held.pop(prompt, ()), leave)
