"""Quarters of the tests: a run of CI takes one of the slow ones, and four runs in a row take all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def of_quarter(items: Sequence[Item], quarter: int) -> list[Item]:
    """Every fourth: neighbours, which take about as long as one another, are in different quarters.

    Args:
        items: in the same order in every run.
        quarter: from 0 to 3.
    """
    return list(items[quarter::4])
