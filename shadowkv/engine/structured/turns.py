"""``Turns``: time slices for long-running work, fair between tenants. ``GrammarPool`` uses it for slow processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar


class Payer(Protocol):
    """A piece of long-running work for a tenant."""

    @property
    def pays(self) -> str:
        """The tenant that pays for the work."""
        ...


P = TypeVar("P", bound=Payer)


class Turns:
    """Shares time equally between tenants, and a tenant's time equally between its payers.

    A new tenant starts with the least time that any tenant present has had.

    Args:
        places: number of payers that run at a time.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._tenants: dict[str, float] = {}
        self._payers: dict[Payer, float] = {}
        self._running: list[tuple[Payer, str]] = []
        self._since = 0.0

    def change(self, payers: Sequence[P], now: float) -> list[P]:
        """Chooses the payers that run from ``now`` (in seconds) on: those with the least time so far."""
        for payer, tenant in self._running:
            self._tenants[tenant] += now - self._since
            self._payers[payer] += now - self._since
        self._since = now
        self._tenants = _with_newcomers(self._tenants, [payer.pays for payer in payers])
        self._payers = _with_newcomers(self._payers, payers)
        ahead, waiting, chosen = Counter[str](), list(payers), list[P]()
        while waiting and len(chosen) < self._places:
            one = min(waiting, key=lambda payer: (ahead[payer.pays], self._tenants[payer.pays], self._payers[payer]))
            ahead[one.pays] += 1
            waiting.remove(one)
            chosen.append(one)
        self._running = [(payer, payer.pays) for payer in chosen]
        return chosen


K = TypeVar("K")


def _with_newcomers(had: dict[K, float], present: Iterable[K]) -> dict[K, float]:
    present = list(present)
    least = min((had[one] for one in present if one in had), default=0.0)
    return {one: had.get(one, least) for one in present}
