"""Chains of copies on the way back: from the disk to host memory, and from there to a new sequence on the device.

A chain is brought back if that takes less time than computing its tokens, by the ``Speeds`` measured so far.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.snapshots.header import Link
from shadowkv.kvcache.snapshots.layers import Restoring
from shadowkv.prefix_cache.copies import Copies
from shadowkv.prefix_cache.disk.tier import DiskTier
from shadowkv.prefix_cache.host import Mover, StreamArrival
from shadowkv.prefix_cache.matches import Step
from shadowkv.prefix_cache.stats import Counts
from shadowkv.prefix_cache.tree import Copy, Node

FETCH_SECONDS, MAX_FETCH_SECONDS = 1.0, 30.0
"""Minimum and maximum seconds that requests wait for what is read from the disk, which may hang."""


RETRY_SECONDS = 30.0
"""After how long a file that could not be read is tried again."""

NEW = 0.3
"""Weight of the last measurement."""

LONG = 1024
"""New tokens from which on prompts are long enough to measure speed: fewer take as long as their launches."""


class Rate:
    """Recent seconds per unit; a guess until something has been measured."""

    def __init__(self, guess: float) -> None:
        self.per_unit, self.measured = guess, False

    def add(self, units: int, seconds: float) -> None:
        """Takes a measurement into account."""
        if units:
            new = seconds / units
            self.per_unit = self.per_unit + NEW * (new - self.per_unit) if self.measured else new
            self.measured = True

    def seconds(self, units: int) -> float:
        """The time that so many units are likely to take."""
        return units * self.per_unit


class Speeds:
    """Times of computing prompts, by token, and of transfers, by byte.

    Attributes:
        host: from host memory to the device.
        disk: from the disk to host memory.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Returns to the initial guesses."""
        self._prefill = Rate(1e-3)
        self.host, self.disk = Rate(1 / 20e9), Rate(1 / 1e9)

    def computed(self, tokens: int, seconds: float) -> None:
        """Records prompts that were computed together. Short ones count until there is a long one: they overestimate
        the time per token, but a guess may be further off. Less than a page is what remains of a cached prompt, and
        says nothing about speed."""
        if tokens >= LONG:
            self._prefill.add(tokens, seconds)
        elif tokens >= PAGE and not self._prefill.measured:
            self._prefill.per_unit = seconds / tokens

    def computing_seconds(self, tokens: int) -> float:
        """Time to compute ``tokens`` tokens of a prompt."""
        return self._prefill.seconds(tokens)


class Arriving(NamedTuple):
    """A chain on its way to the device: what its kernels read, and its size in bytes."""

    arrival: StreamArrival
    restoring: Restoring
    copies: list[Copy]
    nbytes: int


class Chains:
    """Brings chains back.

    Attributes:
        arriving: those on their way to the device.
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
        """Whether anything is on its way."""
        return bool(self.arriving or self._fetching)

    @property
    def futures(self) -> list[Future[float]]:
        """The reads in progress."""
        return [copy.fetching for copy in self._fetching if copy.fetching]

    def find(self, node: Node, stop: int) -> tuple[list[Step], CachedSequence | None] | None:
        """What has to be restored for the pages of ``node`` up to ``stop``, in order, and the sequence on the device
        that has all before it; None where something is missing."""
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
        """A chain as the cache takes it."""
        return [Link(step.copy.header, step.stop * PAGE) for step in steps]

    def seconds(self, steps: list[Step]) -> float:
        """The time to restore a chain, estimated from earlier restores."""
        nbytes = sum(step.copy.header.nbytes for step in steps)
        on_disk = sum(step.copy.header.nbytes for step in steps if not step.copy.on_host)
        return self._speeds.host.seconds(nbytes) + self._speeds.disk.seconds(on_disk)

    def fetch(self, steps: list[Step], patience: float) -> float | None:
        """Begins to bring a chain to host memory, where it is not there already.

        Returns until when it is worth waiting for, by ``time.monotonic``: 0 where it is there, None where there is no
        room for it or the disk takes more seconds than ``patience``, within those bounds.
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
                copy.slabs = self._copies.room(copy.header.nbytes, spare)
            if copy.slabs is None:
                return None
            copy.users += 1
            copy.fetching = self._disk.read(copy.file, self._copies.buffers(copy), copy.token_ids)
            self._fetching[copy] = now
        return until

    def restore(self, steps: list[Step], start: int, capacity: int, parent: CachedSequence | None) -> CachedSequence:
        """A sequence restored from a chain in host memory; raises as ``Snapshots.restore`` does."""
        restoring = self._cache.snapshots.restore(self.links(steps), start, capacity, parent)
        copies = [step.copy for step in steps]
        parts = [(copy.header, copy.slabs or []) for copy in copies]
        began, nbytes = time.monotonic(), sum(copy.header.nbytes for copy in copies)
        try:
            arrival = self._mover.up(restoring, parts)
        except BaseException:
            self._mover.finish()
            self._cache.release(restoring.sequence)
            raise
        for step, copy in zip(steps, copies, strict=True):
            tier = "disk" if copy.from_disk else "host"
            self._counts[tier].add(hit_tokens=(step.stop - copy.node.first) * PAGE)
            copy.from_disk = False
        if parent is not None:
            self._counts["device"].add(hit_tokens=copies[0].node.first * PAGE)
        if arrival is None:
            self._arrived(nbytes, time.monotonic() - began)
        else:
            restoring.sequence.pending_layers = arrival
            for copy in copies:
                copy.users += 1
            self.arriving.append(Arriving(arrival, restoring, copies, nbytes))
        return restoring.sequence

    def advance(self) -> None:
        """Handles what has arrived."""
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
            self._speeds.disk.add(copy.header.nbytes, done.result())
        self._copies.leave(copy)

    def _arrived(self, nbytes: int, seconds: float) -> None:
        self._speeds.host.add(nbytes, seconds)
        self._counts["host"].add(restores=1, restored_bytes=nbytes, restore_seconds=seconds)
