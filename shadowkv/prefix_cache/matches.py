"""What a request asks the prefix cache for, the answer, and the answers that waiting requests were given."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.prefix_cache.copies import Copies
from shadowkv.prefix_cache.page_names import PageNames
from shadowkv.prefix_cache.tree import Copy


@dataclass(frozen=True, eq=False)
class Prompt:
    """What a request asks the cache for.

    Attributes:
        token_ids: of the prompt, or of prompt and answer.
        pages: names of its full pages.
    """

    token_ids: list[int]
    pages: PageNames

    @property
    def shareable(self) -> list[str]:
        """Names of the pages that another sequence may compute for it: at least one token is left over."""
        return self.pages[: (len(self.token_ids) - 1) // PAGE]


@dataclass(frozen=True)
class Step:
    """A copy that is to be restored, and the page up to which it is used."""

    copy: Copy
    stop: int


@dataclass(frozen=True)
class Match:
    """A prefix of a prompt that is cached.

    Attributes:
        sequence: the one on the device that has it, or what precedes ``steps``; None where these have all of it.
        tokens: its length; at least one prompt token is left to compute.
        takes_over: whether the sequence itself, which is not in use, can be taken over; otherwise it is forked.
        steps: what is to be restored from the tiers below.
        until: when to stop waiting for the part that is on its way from the disk, by ``time.monotonic``; 0 where all is
            in host memory.
    """

    sequence: CachedSequence | None
    tokens: int
    takes_over: bool = False
    steps: tuple[Step, ...] = ()
    until: float = 0.0

    @property
    def ready(self) -> bool:
        """Whether all of it is there, with nothing still on its way from the disk."""
        return not self.until


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
        restored = tuple(step.copy for step in match.steps) if match else ()
        if restored == held:
            return
        if not self._fit(restored, copies):
            restored = ()
        for copy in restored:
            copy.users += 1
        self.uses.update(restored)
        self._let_go(held, copies)
        self._held[prompt] = restored

    def _fit(self, more: tuple[Copy, ...], copies: Copies) -> bool:
        """Whether these may be held as well."""
        slabs = (copies.host.slabs_of(copy.header.nbytes) for copy in {*self.uses, *more})
        return 2 * sum(slabs) <= copies.host.num_slabs

    def _let_go(self, held: tuple[Copy, ...], copies: Copies | None) -> None:
        for copy in held:
            self.uses[copy] -= 1
            if not self.uses[copy]:
                del self.uses[copy]
            if copies is not None:
                copies.leave(copy)

    def forget(self, prompt: Prompt, copies: Copies | None) -> None:
        """Drops a prompt that is no longer waiting, and what was held for it among ``copies``, where these are still in
        use."""
        self._found.pop(prompt, None)
        self._let_go(self._held.pop(prompt, ()), copies)
