"""A queue for a few places (threads or processes) that tenants share fairly: many items of one tenant do not delay the
few items of another."""

from __future__ import annotations

from collections import Counter, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class TenantQueue(Generic[T]):
    """Items that wait for a place, by tenant.

    A free place goes to the tenant with the fewest places in use. Among tenants with equally many, it goes to the one
    that came, or gave back a place, longest ago. Items of one tenant keep their order. If there are several places, a
    tenant that has one never gets the last free place. So the next tenant to come can start at once.

    Args:
        places: number of places.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._waiting: dict[str, deque[T]] = {}  # ordered by the tenants' last arrival or place, oldest first

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def append(self, tenant: str, item: T) -> None:
        """Adds an item."""
        self._waiting.setdefault(tenant, deque()).append(item)

    def remove(self, tenant: str, item: T) -> bool:
        """Removes an item. Returns False if it does not wait."""
        items = self._waiting.get(tenant)
        if items is None or item not in items:
            return False
        items.remove(item)
        if not items:
            del self._waiting[tenant]
        return True

    def pop(self, in_use: Counter[str]) -> T | None:
        """Removes and returns the item that gets the next place; None if no item can get one. ``in_use`` counts the
        places of each tenant."""
        free = self._places - in_use.total()
        able = [tenant for tenant in self._waiting if free > (1 if in_use[tenant] and self._places > 1 else 0)]
        if not able:
            return None
        tenant = min(able, key=in_use.__getitem__)
        items = self._waiting.pop(tenant)
        item = items.popleft()
        if items:
            self._waiting[tenant] = items
        return item

    def had(self, tenant: str) -> None:
        """Records that a tenant has just given back a place."""
        if (items := self._waiting.pop(tenant, None)) is not None:
            self._waiting[tenant] = items

    def clear(self) -> list[T]:
        """Removes and returns all items."""
        waiting, self._waiting = self._waiting, {}
        return [item for items in waiting.values() for item in items]
