"""What a request asks the prefix cache for, and what it is told."""

from __future__ import annotations

from dataclasses import dataclass

from shadowkv.cache.chains import Step
from shadowkv.cache.pages import PageNames
from shadowkv.kvcache.sequence import CachedSequence
from shadowkv.kvcache.spec import PAGE


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
        """Those that another sequence may compute for it: one token at least is left."""
        return self.pages[: (len(self.token_ids) - 1) // PAGE]


@dataclass(frozen=True)
class Match:
    """A prefix of a prompt that is cached.

    Attributes:
        sequence: on the device, that has it, or what stands before ``steps``; None where these have all of it.
        tokens: its length: one prompt token at least is left to compute.
        whole: whether the sequence itself, which nobody uses, can be taken over; otherwise it is forked.
        steps: what is to be restored from the tiers below.
        until: when to wait no longer for what of that is on its way from the disk, by ``time.monotonic``; 0 where all
            is in host memory.
    """

    sequence: CachedSequence | None
    tokens: int
    whole: bool = False
    steps: tuple[Step, ...] = ()
    until: float = 0.0

    @property
    def ready(self) -> bool:
        """Whether it is there, and not still on its way from the disk."""
        return not self.until
