"""Prompts as blocks, by which the router compares them."""

from __future__ import annotations

import json

from shadowkv.engine.process.prefix_table import MAX_BLOCKS
from shadowkv.ray.prefixes import BLOCK_CHARS, prefix_of

LONG = "A sentence of a long document. " * 100
TURNS = [{"role": "user", "content": LONG}, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": LONG}]


def blocks(**body) -> tuple[int, ...]:
    return prefix_of(json.dumps(body).encode())


def test_turns_of_a_conversation_begin_alike_whatever_stands_around_them():
    first, later = blocks(messages=TURNS[:1], max_tokens=3), blocks(stream=True, messages=TURNS, temperature=0.5)
    assert len(later) > len(first) >= len(LONG) // BLOCK_CHARS
    assert later[: len(first) - 1] == first[:-1]


def test_what_a_cache_would_not_share_is_not_alike():
    plain = blocks(messages=TURNS)
    turned = [{"content": turn["content"], "role": turn["role"]} for turn in TURNS]
    assert blocks(messages=turned) == plain and len(set(plain)) == len(plain)
    others = [blocks(messages=TURNS, **more) for more in ({"model": "b"}, {"cache_salt": "b"}, {"tools": [1]})]
    others += [blocks(prompt=LONG), blocks(input=LONG), blocks(messages=TURNS, system="Be brief.")]
    assert not any(set(plain) & set(other) for other in others)


def test_bodies_without_a_prompt_have_no_blocks_and_long_ones_a_limit():
    for body in (b"", b"\xff", b"[1]", b"{", b'{"model": "a"}', b"[" * 10**5, b'{"prompt": "Hi"}'):
        assert prefix_of(body) == ()
    assert len(blocks(prompt=[*range(3 * BLOCK_CHARS * MAX_BLOCKS // 10)])) == MAX_BLOCKS
