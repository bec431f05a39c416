"""Chooses an engine for a prompt: the one that has received the longest prefix of the prompt, because that prefix may
still be in the engine's prefix cache. Of several such engines, the least loaded one is chosen. If it has too many more
requests than the least loaded of all engines, the latter is chosen instead.

Prompts are compared as chains of hashes. A hash covers a block of the prompt and the hash of the block before it. So if
two hashes are equal, the prompts are equal from the beginning to the end of these blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence

MAX_BLOCKS = 4096
"""Maximum number of a prompt's blocks that are compared. The rest of the prompt is ignored."""

REMEMBERED_BLOCKS = 2**17
"""Maximum number of remembered blocks of all prompts together."""

MARGIN = 4
"""The margin of a ``PrefixTable`` is ``max_num_seqs`` divided by this number."""


def margin_of(max_num_seqs: int) -> int:
    """Returns the margin of a ``PrefixTable`` for engines that run ``max_num_seqs`` sequences at once."""
    return max(1, max_num_seqs // MARGIN)


class PrefixTable:
    """Remembers, for the most recently requested prefixes, which engines have received them.

    Args:
        margin: an engine is chosen for its prefix only if it has at most this many more running requests than the least
            loaded engine.
        most: maximum number of remembered blocks.
    """

    def __init__(self, margin: int, most: int = REMEMBERED_BLOCKS) -> None:
        self._margin, self._most = margin, most
        self._given: OrderedDict[Hashable, set[str]] = OrderedDict()
        self._last: dict[str, int] = {}
        self._choices = 0

    def choose(self, prefix: Sequence[Hashable], loads: Mapping[str, int]) -> str:
        """Chooses the engine for a prompt, and remembers that this engine has received the prompt.

        Args:
            prefix: hashes of the prompt's blocks.
            loads: number of running requests of each engine; there is at least one engine.
        """
        longest = set(loads)
        for name in prefix:
            given = longest & self._given.get(name, set())
            if not given:
                break
            longest = given
        chosen = self._least(longest, loads)
        if loads[chosen] > min(loads.values()) + self._margin:
            chosen = self._least(set(loads), loads)
        self._choices += 1
        self._last = {replica: self._last[replica] for replica in loads if replica in self._last}
        self._last[chosen] = self._choices
        self._remember(prefix, chosen)
        return chosen

    def _least(self, replicas: set[str], loads: Mapping[str, int]) -> str:
        """The engine with the least load; among equals the least recently chosen one, so that simultaneous requests
        spread out."""
        return min(replicas, key=lambda replica: (loads[replica], self._last.get(replica, 0), replica))

    def _remember(self, prefix: Sequence[Hashable], replica: str) -> None:
        for name in reversed(prefix):  # the first block is evicted last: later ones are found only through it
            self._given.setdefault(name, set()).add(replica)
            self._given.move_to_end(name)
        while len(self._given) > self._most:
            self._given.popitem(last=False)
