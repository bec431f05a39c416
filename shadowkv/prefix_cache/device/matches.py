"""What a request asks the prefix cache for, and the answer."""

from __future__ import annotations

from dataclasses import dataclass

from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.prefix_cache.device.tree import Node
from shadowkv.prefix_cache.page_names import PageNames


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
    """A node of a chain that is to be restored, and the page up to which it is used."""

    node: Node
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
