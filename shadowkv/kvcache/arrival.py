"""Arrival: layers of a restored sequence that are still on their way to the device."""

from __future__ import annotations

from typing import Protocol


class Arrival(Protocol):
    """What a restored sequence waits for, and those that are forked from it meanwhile; layers arrive in order.

    A prefill waits for each layer before it reads it. A caller that decodes, trims or reads the sequence, or restores
    another one behind it, waits for the last layer first. One that releases it ends the arrival. One that forks,
    extends or truncates it need not wait: the cache does so.
    """

    def wait(self, layer: int) -> None:
        """Returns once what the current stream does from now on comes after ``layer`` and all before it have arrived;
        may be asked for a layer again. Raises if it will not come: the sequence can only be released then."""

    def end(self) -> None:
        """Makes what the current stream does from now on come after all that is still written; nothing is afterwards.
        Raises nothing; others may still wait."""
