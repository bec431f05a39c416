"""Pages of token ids under names: a page's digest says which tokens it has and all that came before it.

Two prompts share as many pages as they have digests in common from the first on. Prompts of other salts share none.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from hashlib import blake2b

import numpy as np

from shadowkv.kvcache.spec import PAGE

DIGEST_BYTES = 16


class PageDigests(list[bytes]):
    """Digests of a growing sequence's full pages.

    Args:
        root: what the first page's digest builds on: other bytes for what must never be shared.
    """

    def __init__(self, root: bytes) -> None:
        super().__init__()
        self.root = root

    def extend_to(self, token_ids: Items[int]) -> PageDigests:
        """Adds the pages that ``token_ids``, all of the sequence's, have beyond those there are."""
        first = len(self) * PAGE
        new = np.asarray(token_ids[first : len(token_ids) // PAGE * PAGE], "<u4").tobytes()
        last = self[-1] if self else self.root
        for start in range(0, len(new), 4 * PAGE):
            last = blake2b(last + new[start : start + 4 * PAGE], digest_size=DIGEST_BYTES).digest()
            self.append(last)
        return self


def root_of(salt: str | None) -> bytes:
    """What digests of a request with that ``cache_salt`` build on."""
    return blake2b(b"" if salt is None else b"salt " + salt.encode(), digest_size=DIGEST_BYTES).digest()


def common_pages(one: Items[bytes], other: Items[bytes]) -> int:
    """Pages that two chains of digests have in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # a digest stands for all before it
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
