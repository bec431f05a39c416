"""Copies of cached prompts in host memory, with tensor parallelism.

All ranks map the same slabs (pieces of host memory). On each rank, a mover copies the rank's part of a sequence between
the device and the slabs. Rank 0 decides what is copied, and where the parts lie in the slabs. It tells the other ranks,
and considers a copy complete when all of them have answered. So the tiers below see one snapshot that has the parts of
all ranks.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.parallel.ranks import Ranks
from shadowkv.engine.startup.prefix_cache import RankCache
from shadowkv.engine.startup.sizing import offload_bytes
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.arenas import OutOfBlocks
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.snapshots.header import Link, SnapshotHeader
from shadowkv.kvcache.snapshots.layers import Reading, Restoring
from shadowkv.kvcache.snapshots.snapshots import counterpart
from shadowkv.layers.group import Group
from shadowkv.models.loader import LoadedModel
from shadowkv.prefix_cache.host import Arrival, HostTier, Mover, Place

logger = logging.getLogger(__name__)

Answering = Generator[None, None, bool]
"""The return type of methods that answer a call of rank 0. The generator is advanced until the answer is known, and
returns it (``Reader.answers``)."""


def open_mover(ranks: Ranks, cache: KVCache, nbytes: int, own: RankCache) -> tuple[Mover, list[RankCache]]:
    """Makes rank 0's mover, with ``nbytes`` bytes of host memory for all ranks, while the other ranks call
    ``join_tiers``. Returns the mover, and the descriptions of all ranks' caches, of which ``own`` is rank 0's. Raises
    MemoryError if the memory cannot be allocated, RankFailure if another rank fails."""
    with ranks.together():
        host = HostTier(ranks.group.agree(nbytes), cache.device, shared=ranks.memory.fileno())
        caches = ranks.group.gather(own)  # gathered last, so that rank 0 waits until all ranks have the memory
    return DriverMover(ranks, cache, host, caches), caches


def join_tiers(
    config: EngineConfig, loaded: LoadedModel, cache: KVCache, group: Group, memory: int
) -> RankMover | None:
    """Makes the mover of a rank other than 0, while rank 0 calls ``open_mover``. Returns None without tiers below the
    device. ``memory`` is the file descriptor of the slabs. Raises MemoryError if they cannot be mapped or pinned."""
    if not offload_bytes(config, cache.layout):
        return None
    own = RankCache.of(config, loaded, cache)
    host = HostTier(group.agree(0), cache.device, shared=memory)
    group.gather(own)
    return RankMover(Mover(cache, host, group.rank))


@dataclass(frozen=True)
class RankArrival:
    """A restored sequence on its way to the devices of all ranks.

    Attributes:
        own: the arrival on rank 0's device.
        others: the other ranks' answers.
    """

    own: Arrival
    others: Future[list[bool]]

    @property
    def done(self) -> bool:
        """Whether all layers of the sequence have arrived on every rank."""
        return self.own.done and self.others.done()

    @property
    def seconds(self) -> float:
        """Seconds that rank 0's copies took."""
        return self.own.seconds


class DriverMover(Mover):
    """The mover of rank 0's parts. The other ranks move their parts at the same time.

    Args:
        caches: descriptions of the caches of all ranks.
    """

    def __init__(self, ranks: Ranks, cache: KVCache, host: HostTier, caches: Sequence[RankCache]) -> None:
        super().__init__(cache, host)
        self._ranks, self._caches = ranks, caches
        self._count, self._numbers = itertools.count(), dict[Reading, int]()

    def parts(self, header: SnapshotHeader) -> tuple[int, ...]:
        return tuple(counterpart(header, one.layout, one.form).nbytes for one in self._caches)

    def open(self, sequence: CachedSequence, start: int, stop: int) -> Reading:
        number = next(self._count)
        # Opening a ``Reading`` of a sequence changes the sequence, even if opening fails. So the other ranks must try
        # to open one too, and are told before rank 0 tries.
        self._call("open", number, sequence, start, stop)
        try:
            reading = super().open(sequence, start, stop)
        except BaseException:
            self._call("close", number)
            raise
        self._numbers[reading] = number
        return reading

    def close(self, reading: Reading) -> None:
        super().close(reading)
        self._call("close", self._numbers.pop(reading))

    def down(self, reading: Reading, place: Place) -> Iterator[int]:
        """As ``Mover.down``, for all ranks. Raises torch.OutOfMemoryError if any rank cannot copy its part. The copy
        has then ended on all ranks."""
        number, failure = self._numbers[reading], None
        self._call("down", number, place)
        try:
            for moved in super().down(reading, place):
                if moved:
                    self._call("advance", number)
                yield moved
        except torch.OutOfMemoryError as error:
            failure = error
        answers = self._ask("end", number, failure is None)
        while not answers.done():
            yield 0
        if failure is not None:
            raise failure
        # If a rank's process has ended, the other ranks' parts may be wrong, so the copy counts as failed.
        if self._ranks.failure is not None or answers.exception() or not all(answers.result()):
            raise torch.OutOfMemoryError("another tensor-parallel rank could not copy its part")

    def restore(
        self,
        links: Sequence[Link],
        places: Sequence[Place],
        start: int,
        capacity: int,
        parent: CachedSequence | None,
    ) -> tuple[Restoring, Arrival]:
        restoring, own = super().restore(links, places, start, capacity, parent)
        arguments, sequence = (list(links), list(places), start, capacity, parent), restoring.sequence
        self._ranks.queue(self._ranks.writer.write("mover", "restore", arguments, sequence))
        return restoring, RankArrival(own, self._ask("restored", sequence))

    def _call(self, method: str, *arguments: Any) -> None:
        self._ranks.queue(self._ranks.writer.write("mover", method, arguments))

    def _ask(self, method: str, *arguments: Any) -> Future[list[bool]]:
        return self._ranks.ask("mover", method, arguments)


@dataclass
class _Job:
    """A copy on its way to host memory.

    Attributes:
        reading: what is copied; None if it could not be opened.
        moves: launches the copy layer by layer (``Mover.down``).
        failed: whether the copy has failed.
        ended: whether no layer is in flight.
    """

    reading: Reading | None
    moves: Iterator[int] = field(default_factory=lambda: iter(()))
    failed: bool = False
    ended: bool = True


class RankMover:
    """Moves the parts of a rank other than 0. ``DriverMover`` on rank 0 calls these methods by name, and gives each
    copy its ``number``.

    A copy that fails on this rank is reported to rank 0. If only this rank fails to restore a sequence, the rank ends
    with an error, because the other ranks do have the sequence.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._jobs: dict[int, _Job] = {}
        self._arriving: dict[CachedSequence, tuple[Restoring, Arrival]] = {}

    def open(self, number: int, sequence: CachedSequence, start: int, stop: int) -> None:
        """Opens the ``Reading`` from which copy ``number`` is made."""
        try:
            self._jobs[number] = _Job(self._mover.open(sequence, start, stop))
        except OutOfBlocks:  # rank 0 fails in the same way, and counts the failure
            self._jobs[number] = _Job(None, failed=True)
        except (ValueError, torch.OutOfMemoryError) as error:
            self._fail(number, error)

    def _fail(self, number: int, error: Exception) -> None:
        logger.warning("a cached prompt is not copied to the host: %s", error)
        self._jobs.setdefault(number, _Job(None)).failed = True

    def down(self, number: int, place: Place) -> None:
        """Begins to copy to ``place``."""
        job = self._jobs[number]
        if job.reading is not None:
            job.moves, job.ended = self._mover.down(job.reading, place), False

    def advance(self, number: int) -> None:
        """Launches the copy of the next layer."""
        job = self._jobs[number]
        if not job.failed:
            try:
                next(job.moves, None)
            except torch.OutOfMemoryError as error:
                self._fail(number, error)

    def end(self, number: int, complete: bool) -> Answering:
        """Waits until no layer is in flight, then answers whether all have arrived. If not ``complete``, rank 0 has
        given up."""
        job = self._jobs[number]
        while complete and not job.failed:
            try:
                if next(job.moves, None) is None:
                    job.ended = True
                    return True
            except torch.OutOfMemoryError as error:
                self._fail(number, error)
                break
            yield
        self._mover.finish()
        job.ended = True
        return False

    def close(self, number: int) -> None:
        """Closes the ``Reading`` of copy ``number``."""
        job = self._jobs.pop(number)
        if not job.ended:
            self._mover.finish()
        if job.reading is not None:
            self._mover.close(job.reading)

    def restore(
        self, links: list[Link], places: list[Place], start: int, capacity: int, parent: CachedSequence | None
    ) -> CachedSequence:
        """Starts to restore a chain of snapshots. ``links`` have rank 0's headers."""
        cache = self._mover.cache
        own = [Link(counterpart(header, cache.layout, cache.snapshots.form), stop) for header, stop in links]
        restoring, arrival = self._mover.restore(own, places, start, capacity, parent)
        self._arriving[restoring.sequence] = restoring, arrival
        return restoring.sequence

    def restored(self, sequence: CachedSequence) -> Answering:
        """Waits until all layers of a restored sequence have arrived, then answers True."""
        _, arrival = self._arriving[sequence]
        while not arrival.done:
            yield
        del self._arriving[sequence]
        return True
