"""Names of a prompt's pages: a page's name says which tokens it has and all that came before it (``key.py``).

Two prompts share as many pages as they have names in common from the first on.
"""

from __future__ import annotations

from collections.abc import Sequence

from shadowkv.cache.key import page_names
from shadowkv.kvcache.spec import PAGE


class PageNames(list[str]):
    """Names of a growing sequence's full pages.

    Args:
        origin: what the first page's name builds on: another one for what must never be shared.
    """

    def __init__(self, origin: str) -> None:
        super().__init__()
        self.origin = origin

    def extend_to(self, token_ids: Sequence[int]) -> PageNames:
        """Adds the pages that ``token_ids``, all of the sequence's, have beyond those there are."""
        new = token_ids[len(self) * PAGE : len(token_ids) // PAGE * PAGE]
        self += [name for _, name in page_names(self[-1] if self else self.origin, new)]
        return self


def common_pages(one: Sequence[str], other: Sequence[str], first: int = 0) -> int:
    """Pages that a prompt from its page ``first`` on, ``one``, and a whole one have in common, by their names."""
    low, high = 0, min(len(one), len(other) - first)
    while low < high:  # a name stands for all before it
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[first + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
