"""Who has the next of a few places that tenants share, so that no tenant's many keep another's few waiting."""

from __future__ import annotations

from collections import Counter, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class TenantQueue(Generic[T]):
    """What waits for a place, by tenant.

    A free place goes to the tenant with the fewest in use; of those with as many, to the one that has waited longest
    since it came or had a place. What one tenant asks for has places in the order in which it came. A tenant with a
    place never gets the last free one, where there are several: whoever comes next can begin at once.

    Args:
        places: how many there are.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._waiting: dict[str, deque[T]] = {}  # who waited or had a place last comes last

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def append(self, tenant: str, item: T) -> None:
        """Has an item wait."""
        self._waiting.setdefault(tenant, deque()).append(item)

    def remove(self, tenant: str, item: T) -> bool:
        """Has an item wait no more; False if it does not."""
        items = self._waiting.get(tenant)
        if items is None or item not in items:
            return False
        items.remove(item)
        if not items:
            del self._waiting[tenant]
        return True

    def pop(self, in_use: Counter[str]) -> T | None:
        """Takes the item that has the next place; None if there is none, or no free place. ``in_use`` are the places
        that each tenant has."""
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
        """Notes that a tenant had a place until now."""
        if (items := self._waiting.pop(tenant, None)) is not None:
            self._waiting[tenant] = items

    def clear(self) -> list[T]:
        """Takes all items."""
        waiting, self._waiting = self._waiting, {}
        return [item for items in waiting.values() for item in items]
