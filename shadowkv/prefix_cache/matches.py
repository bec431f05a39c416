"""``Prompt`` is what a request asks the prefix cache for, and ``Match`` is the answer. ``Lookups`` stores the answers
for waiting requests."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.prefix_cache.copies import Copies
from shadowkv.prefix_cache.page_hashes import PageHashes
from shadowkv.prefix_cache.tree import Copy


@dataclass(frozen=True, eq=False)
class Prompt:
    """The tokens of a request, by which the cache finds prefixes.

    Attributes:
        token_ids: ids of the prompt's tokens, or of prompt and answer.
        pages: hashes of the full pages.
    """

    token_ids: list[int]
    pages: PageHashes

    @property
    def shareable(self) -> list[str]:
        """Hashes of the pages that can be reused from other sequences. At least one token remains to be computed."""
        return self.pages[: (len(self.token_ids) - 1) // PAGE]


@dataclass(frozen=True)
class Step:
    """A copy to restore. Its pages are used up to page ``stop`` (excluded) of the prompt."""

    copy: Copy
    stop: int


@dataclass(frozen=True)
class Match:
    """A cached prefix of a prompt.

    Attributes:
        sequence: the sequence on the device that has the prefix. If there are ``steps``, the sequence has the tokens
            before the steps; it is None if the steps start with the first token.
        tokens: number of tokens of the prefix. At least one token of the prompt remains to be computed.
        takes_over: whether to take over the sequence, which is not in use, instead of forking it.
        steps: copies to restore from the lower tiers, in the order of their pages.
        until: when to stop waiting for reads from the disk, by ``time.monotonic``; 0 if all steps are in host memory.
    """

    sequence: CachedSequence | None
    tokens: int
    takes_over: bool = False
    steps: tuple[Step, ...] = ()
    until: float = 0.0

    @property
    def ready(self) -> bool:
        """Whether the match can be used at once, because it needs no read from the disk."""
        return not self.until


class Lookups:
    """Matches of waiting prompts.

    A prompt holds the copies of its match, so that they stay in host memory. All held copies together take at most half
    of host memory. The rest is for copies that are read from the disk or made of new prompts.

    Attributes:
        uses: number of prompts that hold each copy.
    """

    def __init__(self) -> None:
        self._found: dict[Prompt, tuple[Match | None, int]] = {}
        self._held: dict[Prompt, tuple[Copy, ...]] = {}
        self.uses: Counter[Copy] = Counter()

    def current(self, prompt: Prompt, changes: int) -> bool:
        """Whether a prompt's recorded match is still valid: nothing has changed since, and its reads from the disk are
        not late."""
        match, then = self._found.get(prompt, (None, -1))
        return then == changes and (match is None or match.ready or time.monotonic() <= match.until)

    @property
    def deferred(self) -> int:
        """Number of prompts that wait for reads from the disk. Any thread may read it."""
        return sum(match is not None and not match.ready for match, _ in [*self._found.values()])

    def match(self, prompt: Prompt) -> Match | None:
        """The match recorded for a prompt."""
        return self._found[prompt][0]

    def note(self, prompt: Prompt, match: Match | None, changes: int) -> None:
        """Records a match."""
        self._found[prompt] = match, changes

    def hold(self, prompt: Prompt, match: Match | None, copies: Copies) -> None:
        """Makes a prompt hold the copies of a match instead of its former copies. If these do not fit, it holds
        none."""
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
        """Whether held copies and ``more`` fit in half of host memory."""
        slabs = (copies.host.slabs_of(copy.nbytes) for copy in {*self.uses, *more})
        return 2 * sum(slabs) <= copies.host.num_slabs

    def _let_go(self, held: tuple[Copy, ...], copies: Copies | None) -> None:
        for copy in held:
            self.uses[copy] -= 1
            if not self.uses[copy]:
                del self.uses[copy]
            if copies is not None:
                copies.leave(copy)

    def forget(self, prompt: Prompt, copies: Copies | None) -> None:
        """Drops a prompt that no longer waits, and its hold on copies. ``copies`` is None if the lower tiers are not
        used any more."""
        self._found.pop(prompt, None)
        self._let_go(self._held.pop(prompt, ()), copies)
