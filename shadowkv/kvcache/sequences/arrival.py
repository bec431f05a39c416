"""Arrival: layers of a restored sequence that are still on their way to the device."""

from __future__ import annotations

from typing import Protocol


class Arrival(Protocol):
    """What a restored sequence and those forked from it in the meantime wait for; layers arrive in order.

    A prefill waits for each layer before it reads it. A caller that decodes, trims or reads the sequence, or restores
    another one after it, waits for the last layer first. One that releases it ends the arrival. One that forks,
    extends or truncates it need not wait: the cache does so.
    """

    def wait(self, layer: int) -> None:
        """Returns once subsequent work on the current stream is ordered after the arrival of ``layer`` and all before
        it; may be called again for a layer. Raises if it will not arrive: the sequence can then only be released."""

    def end(self) -> None:
        """Orders subsequent work on the current stream after all writes still under way; nothing is written after
        those. Never raises; others may still wait."""
