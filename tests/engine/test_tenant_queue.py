"""Places that tenants share."""

from __future__ import annotations

from collections import Counter

import pytest

from shadowkv.engine.tenant_queue import TenantQueue


def queue(places: int, *items: str) -> TenantQueue[str]:
    """Items of the tenants that their first letters name."""
    waiting = TenantQueue[str](places)
    for item in items:
        waiting.append(item[0], item)
    return waiting


@pytest.mark.parametrize(
    ("places", "items", "in_use", "is_next"),
    [
        (3, ["a1", "a2", "b1"], {}, "a1"),
        (3, ["a2", "b1"], {"a": 1}, "b1"),
        (3, ["a2"], {"a": 1}, "a2"),
        (3, ["a3"], {"a": 2}, None),
        (3, ["a3", "b1"], {"a": 2}, "b1"),
        (3, ["b1"], {"a": 2, "c": 1}, None),
        (1, ["a1"], {}, "a1"),
        (1, ["b1"], {"a": 1}, None),
        (2, [], {}, None),
    ],
)
def test_the_tenant_with_the_fewest_places_is_next_and_leaves_the_last_one_to_others(
    places: int, items: list[str], in_use: dict[str, int], is_next: str | None
) -> None:
    assert queue(places, *items).pop(Counter(in_use)) == is_next


def test_tenants_with_as_many_places_take_turns_whatever_came_first() -> None:
    waiting = queue(1, "a1", "a2", "a3", "b1", "b2", "c1")
    assert [waiting.pop(Counter()) for _ in range(6)] == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert not waiting


def test_what_waits_no_more_is_not_next() -> None:
    waiting = queue(1, "a1", "a2", "b1")
    assert waiting.remove("b", "b1") and not waiting.remove("b", "b1") and not waiting.remove("a", "a3")
    assert waiting.remove("a", "a1") and waiting.pop(Counter()) == "a2" and not waiting
    waiting = queue(1, "a1", "b1")
    assert waiting.clear() == ["a1", "b1"] and not waiting
