"""Which replica gets a request: prompts as blocks, and the table of who was given which."""

from __future__ import annotations

import json

from shadowkv.ray.prefixes import BLOCK_CHARS, MAX_BLOCKS, PrefixTable, prefix_of

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


def test_the_longest_match_wins_until_it_has_too_much_to_do():
    table = PrefixTable(margin=2)
    assert table.choose((1, 2, 3), {"a": 0, "b": 1}) == "a"
    assert table.choose((1, 9), {"a": 3, "b": 0}) == "b"  # a shared beginning, but too much to do
    assert table.choose((1, 2, 3, 4), {"a": 2, "b": 0}) == "a"
    assert table.choose((1, 9, 8), {"a": 0, "b": 2}) == "b"
    assert table.choose((1, 7), {"a": 1, "b": 0}) == "b"  # both have it: the one with less to do
    assert table.choose((1, 2, 3), {"b": 0, "c": 0}) in "bc"  # "a" is gone


def test_requests_that_come_at_once_are_shared_out():
    table = PrefixTable(margin=2)
    assert sorted(table.choose((), dict.fromkeys("abc", 0)) for _ in range(6)) == [*"aabbcc"]


def test_what_was_not_asked_for_is_forgotten_from_its_end_on():
    table = PrefixTable(margin=9, most=4)
    table.choose((1, 2, 3), {"a": 0})
    table.choose((5, 6), {"b": 0})
    # Of (1, 2, 3) the last block is gone, and the first two are still known.
    assert table.choose((1, 2), {"a": 5, "b": 0}) == "a"
    table.choose((7, 8, 9, 10), {"b": 0})
    assert table.choose((1, 2), {"a": 5, "b": 0}) == "b"
