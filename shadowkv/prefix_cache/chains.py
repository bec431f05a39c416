"""``Chains``: restores chains of copies, from the disk to host memory and from there to a new sequence on the device.

A chain has the copies of a node and of its ancestors, back to the prompt's first page or to an ancestor on the device.
The prefix cache restores a chain if, by the ``Speeds`` measured so far, this takes less time than computing the chain's
tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.snapshots.header import Link
from shadowkv.kvcache.snapshots.layers import Restoring
from shadowkv.prefix_cache.copies import Copies
from shadowkv.prefix_cache.disk.tier import DiskTier
from shadowkv.prefix_cache.host import Arrival, Mover, Place
from shadowkv.prefix_cache.matches import Step
from shadowkv.prefix_cache.stats import Counts
from shadowkv.prefix_cache.tree import Copy, Node

FETCH_SECONDS, MAX_FETCH_SECONDS = 1.0, 30.0
"""Smallest and largest limit, in seconds, on how long a request waits for reads from the disk. The disk may hang."""


RETRY_SECONDS = 30.0
"""Seconds after which a file that could not be read is tried again."""

NEW = 0.3
"""Weight of the last measurement in the moving average."""

LONG = 1024
"""Minimum number of new tokens of a prompt for measuring speed. With a shorter prompt, launching the kernels takes most
of the time."""


class Rate:
    """Moving average of seconds per unit. It is a guess until the first measurement."""

    def __init__(self, guess: float) -> None:
        self.per_unit, self.measured = guess, False

    def add(self, units: int, seconds: float) -> None:
        """Adds a measurement."""
        if units:
            new = seconds / units
            self.per_unit = self.per_unit + NEW * (new - self.per_unit) if self.measured else new
            self.measured = True

    def seconds(self, units: int) -> float:
        """Expected seconds for ``units`` units."""
        return units * self.per_unit


class Speeds:
    """Measured speeds of computing prompts, per token, and of transfers, per byte.

    Attributes:
        host: transfers from host memory to the device.
        disk: transfers from the disk to host memory.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Returns to the initial guesses."""
        self._prefill = Rate(1e-3)
        self.host, self.disk = Rate(1 / 20e9), Rate(1 / 1e9)

    def computed(self, tokens: int, seconds: float) -> None:
        """Records prompts that were computed together.

        With short prompts the measured time per token is too long, but the initial guess may be worse. So short prompts
        count until a prompt of ``LONG`` tokens has been measured. Fewer tokens than a page never count: they are the
        uncached rest of a prompt.
        """
        if tokens >= LONG:
            self._prefill.add(tokens, seconds)
        elif tokens >= PAGE and not self._prefill.measured:
            self._prefill.per_unit = seconds / tokens

    def computing_seconds(self, tokens: int) -> float:
        """Expected seconds to compute ``tokens`` tokens of a prompt."""
        return self._prefill.seconds(tokens)


class Arriving(NamedTuple):
    """A chain on its way to the device. ``copies`` are the copies that it consists of. They have ``nbytes`` bytes
    together."""

    arrival: Arrival
    restoring: Restoring
    copies: list[Copy]
    nbytes: int


class Chains:
    """Restores chains of copies.

    Attributes:
        arriving: chains on their way to the device.
    """

    def __init__(
        self,
        cache: KVCache,
        copies: Copies,
        mover: Mover,
        disk: DiskTier | None,
        counts: Mapping[str, Counts],
        speeds: Speeds,
    ) -> None:
        self._cache, self._copies, self._mover, self._disk = cache, copies, mover, disk
        self._counts, self._speeds = counts, speeds
        self.arriving: list[Arriving] = []
        self._fetching: dict[Copy, float] = {}

    @property
    def busy(self) -> bool:
        """Whether chains are on their way, or reads from the disk are in progress."""
        return bool(self.arriving or self._fetching)

    @property
    def futures(self) -> list[Future[float]]:
        """The reads from the disk that are in progress."""
        return [copy.fetching for copy in self._fetching if copy.fetching]

    def find(self, node: Node, stop: int) -> tuple[list[Step], CachedSequence | None] | None:
        """Returns the chain of ``node`` up to page ``stop`` (excluded) of the prompt, and the sequence that the chain
        continues.

        The copies are in the order of their pages. The sequence is on the device and has all earlier pages. It is None
        if the chain starts with the prompt's first page. Returns None if a copy is missing.
        """
        steps: list[Step] = []
        at: Node | None = node
        while at is not None:
            copy = at.copy
            if copy is None or not copy.usable or PAGE * stop > copy.header.length:
                return None
            steps.insert(0, Step(copy, stop))
            parent, stop = at.parent, at.first
            if parent is None:
                return steps, None
            at = parent
            for sequence, held in at.holders.items():
                alike = held >= stop and bool(sequence.path) == at.compressed
                if alike and self._cache.fork_point(sequence, stop * PAGE) == stop * PAGE:
                    return steps, sequence
        return None

    def links(self, steps: Sequence[Step]) -> list[Link]:
        """Returns a chain in the form that the cache's ``Snapshots`` take."""
        return [Link(step.copy.header, step.stop * PAGE) for step in steps]

    def seconds(self, steps: list[Step]) -> float:
        """Expected seconds to restore a chain."""
        nbytes = sum(step.copy.nbytes for step in steps)
        on_disk = sum(step.copy.nbytes for step in steps if not step.copy.on_host)
        return self._speeds.host.seconds(nbytes) + self._speeds.disk.seconds(on_disk)

    def fetch(self, steps: list[Step], patience: float) -> float | None:
        """Starts to read from the disk those copies of a chain that are not in host memory.

        Returns:
            The time, by ``time.monotonic``, until which to wait for the reads. 0 if all copies are in host memory. The
            limit for a read is ``patience`` seconds, but at least ``FETCH_SECONDS`` and at most ``MAX_FETCH_SECONDS``.
            None if a read has exceeded its limit, if host memory has no room, or if a file cannot be read now.
        """
        until, now = 0.0, time.monotonic()
        seconds = min(max(FETCH_SECONDS, patience), MAX_FETCH_SECONDS)
        self._copies.eviction.touch(steps[-1].copy.node)
        spare = {step.copy.node for step in steps}
        for copy in (step.copy for step in steps):
            if copy.on_host:
                continue
            late = self._fetching.get(copy, now) + seconds
            if late < now:
                return None
            until = min(until or late, late)
            if copy.fetching is not None:
                continue
            if self._disk is None or copy.file is None or now < copy.retry_at:
                return None
            if copy.slabs is None:
                copy.slabs = self._copies.room(copy.nbytes, spare)
            if copy.slabs is None:
                return None
            copy.users += 1
            copy.fetching = self._disk.read(copy.file, self._copies.buffers(copy), copy.token_ids)
            self._fetching[copy] = now
        return until

    def restore(self, steps: list[Step], start: int, capacity: int, parent: CachedSequence | None) -> CachedSequence:
        """Starts to restore a chain, which is in host memory, and returns the new sequence. It has blocks for a prompt
        of ``start`` tokens, and for growth to ``capacity`` tokens by decoding. It shares the pages before the chain
        with ``parent``.

        Raises the errors of ``Snapshots.restore``.
        """
        copies = [step.copy for step in steps]
        places, nbytes = [Place(copy.slabs or [], copy.parts) for copy in copies], sum(copy.nbytes for copy in copies)
        restoring, arrival = self._mover.restore(self.links(steps), places, start, capacity, parent)
        for step, copy in zip(steps, copies, strict=True):
            tier = "disk" if copy.from_disk else "host"
            self._counts[tier].add(hit_tokens=(step.stop - copy.node.first) * PAGE)
            copy.from_disk = False
        if parent is not None:
            self._counts["device"].add(hit_tokens=copies[0].node.first * PAGE)
        if arrival.done:
            self._arrived(nbytes, arrival.seconds)
        else:
            for copy in copies:
                copy.users += 1
            self.arriving.append(Arriving(arrival, restoring, copies, nbytes))
        return restoring.sequence

    def advance(self) -> None:
        """Handles chains and reads that have arrived."""
        for arriving in [arriving for arriving in self.arriving if arriving.arrival.done]:
            self.arriving.remove(arriving)
            for copy in arriving.copies:
                self._copies.leave(copy)
            self._arrived(arriving.nbytes, arriving.arrival.seconds)
        for copy in list(self._fetching):
            if copy.fetching is not None and copy.fetching.done():
                del self._fetching[copy]
                self._end_fetch(copy, copy.fetching)

    def _end_fetch(self, copy: Copy, done: Future[float]) -> None:
        copy.fetching = None
        if not done.cancelled() and isinstance(done.exception(), OSError):
            copy.retry_at = time.monotonic() + RETRY_SECONDS  # the disk tier has logged why
        elif done.cancelled() or done.exception() is not None:
            copy.file = None
        else:
            copy.ready = copy.from_disk = True
            self._speeds.disk.add(copy.nbytes, done.result())
        self._copies.leave(copy)

    def _arrived(self, nbytes: int, seconds: float) -> None:
        self._speeds.host.add(nbytes, seconds)
        self._counts["host"].add(restores=1, restored_bytes=nbytes, restore_seconds=seconds)
