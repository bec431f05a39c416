"""Names of a prompt's pages: a page's name says which tokens it has and all that came before it (``key.py``).

The pages that two prompts share are those whose names agree, from the first on.
"""

from __future__ import annotations

from collections.abc import Sequence

from shadowkv.cache.key import page_names
from shadowkv.kvcache.policy.spec import PAGE


class PageNames(list[str]):
    """Names of a growing sequence's full pages.

    Args:
        origin: what the first page's name builds on; a unique one for what must never be shared.
    """

    def __init__(self, origin: str) -> None:
        super().__init__()
        self.origin = origin

    def extend_to(self, token_ids: Sequence[int]) -> PageNames:
        """Adds the pages that ``token_ids``, the whole sequence's, have beyond those already named."""
        new = token_ids[len(self) * PAGE : len(token_ids) // PAGE * PAGE]
        self += [name for _, name in page_names(self[-1] if self else self.origin, new)]
        return self


def common_pages(one: Sequence[str], other: Sequence[str], first: int = 0) -> int:
    """Number of pages, by name, that a prompt from its page ``first`` on (``one``) and a whole prompt share."""
    low, high = 0, min(len(one), len(other) - first)
    while low < high:  # a name covers all pages before it
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[first + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
