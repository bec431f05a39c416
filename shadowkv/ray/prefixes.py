"""Hashes of the blocks of a prompt, by which the router (``router.py``) compares it with others.

Prompts are compared as text, in blocks of characters, because tokens would need the model's tokenizer and chat
template.
"""

from __future__ import annotations

import json

import xxhash

from shadowkv.engine.process.prefix_table import MAX_BLOCKS

BLOCK_CHARS = 256
"""Number of characters of JSON in a block. They are about 64 tokens, as many as a page of the prefix cache has."""

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
