"""Chooses a replica for a prompt: the one that has received the longest prefix of the prompt, because that prefix may
still be in the replica's prefix cache. Of several such replicas, the least loaded one is chosen. If it has too many
more requests than the least loaded of all replicas, the latter is chosen instead.

Prompts are compared as text, in blocks of characters, because tokens would need the model's tokenizer and chat
template. A block's hash covers its text and the hash of the block before it. So if two blocks have the same hash, the
prompts have the same text from the beginning to the end of these blocks.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import xxhash

BLOCK_CHARS = 256
"""Number of characters of JSON in a block. They are about 64 tokens, as many as a page of the prefix cache has."""

MAX_BLOCKS = 4096
"""Maximum number of a prompt's blocks that are compared, a million characters. The router ignores the text after
them."""

REMEMBERED_BLOCKS = 2**17
"""Maximum number of remembered blocks of all prompts together: 32 million characters."""

BEFORE = ("model", "cache_salt", "tools", "system", "instructions")
PROMPT = ("messages", "prompt", "input")
"""Fields of requests that make up the prompt, in every API; no request has two of ``PROMPT``."""


def prefix_of(body: bytes | bytearray) -> tuple[int, ...]:
    """Returns the hashes of the complete blocks of a request's prompt, in order; empty for a body without a prompt."""
    try:
        fields = json.loads(body)
        if not isinstance(fields, dict) or not any(name in fields for name in PROMPT):
            return ()
        values = [fields.get(name) for name in (*BEFORE, *PROMPT)]
        text = json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
    except (ValueError, RecursionError):  # the replica refuses such a body
        return ()
    names, name = [], 0
    for end in range(BLOCK_CHARS, min(len(text), MAX_BLOCKS * BLOCK_CHARS) + 1, BLOCK_CHARS):
        name = xxhash.xxh3_64_intdigest(text[end - BLOCK_CHARS : end], seed=name)
        names.append(name)
    return tuple(names)


class PrefixTable:
    """Remembers, for the most recently requested prefixes, which replicas have received them.

    Args:
        margin: a replica is chosen for its prefix only if it has at most this many more running requests than the least
            loaded replica.
        most: maximum number of remembered blocks.
    """

    def __init__(self, margin: int, most: int = REMEMBERED_BLOCKS) -> None:
        self._margin, self._most = margin, most
        self._given: OrderedDict[int, set[str]] = OrderedDict()
        self._last: dict[str, int] = {}
        self._choices = 0

    def choose(self, prefix: Sequence[int], loads: Mapping[str, int]) -> str:
        """Chooses the replica for a prompt, and remembers that this replica has received the prompt.

        Args:
            prefix: hashes of the prompt's blocks, from ``prefix_of``.
            loads: number of running requests of each replica; there is at least one replica.
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
        """The replica with the least load; among equals the least recently chosen one, so that simultaneous requests
        spread out."""
        return min(replicas, key=lambda replica: (loads[replica], self._last.get(replica, 0), replica))

    def _remember(self, prefix: Sequence[int], replica: str) -> None:
        for name in reversed(prefix):  # the first block is evicted last: later ones are found only through it
            self._given.setdefault(name, set()).add(replica)
            self._given.move_to_end(name)
        while len(self._given) > self._most:
            self._given.popitem(last=False)
