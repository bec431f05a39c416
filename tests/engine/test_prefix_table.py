"""Which engine gets a prompt, by the table of who was given which."""

from __future__ import annotations

from shadowkv.engine.process.prefix_table import PrefixTable, margin_of


def test_the_margin_is_a_quarter_of_what_an_engine_runs():
    assert [margin_of(count) for count in (1, 4, 7, 48)] == [1, 1, 1, 12]


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
