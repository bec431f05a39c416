"""Batches for training: retrieval samples made ahead by other processes, and chats in rows of like length."""

from __future__ import annotations

import multiprocessing
import random
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

from training.samples import Tokens, retrieval_batch

AHEAD = 16
"""Batches of retrieval samples that are made or waiting."""


class Lengths:
    """Which length a batch has: each has its share of the whole time, in a given order or mixed.

    Args:
        shares: length in tokens -> share of the time.
        phased: one length after another, as they are named; otherwise the one that is most behind its share.
    """

    def __init__(self, shares: dict[int, float], phased: bool) -> None:
        total = sum(shares.values())
        self.shares = {length: share / total for length, share in shares.items()}
        self.phased = phased
        self._asked = dict.fromkeys(shares, 0)
        self._cost = {length: 1.0 for length in shares}

    def took(self, length: int, seconds: float) -> None:
        """A step with a batch of that length took so long: costs are running means."""
        self._cost[length] += 0.3 * (seconds - self._cost[length])

    def next(self, progress: float) -> int:
        """The length of the batch to make next, when ``progress`` (0 to 1) of the time has passed."""
        if self.phased:
            for length, share in self.shares.items():
                progress -= share
                if progress < 0:
                    return length
            return length
        chosen = min(self.shares, key=lambda length: self._asked[length] * self._cost[length] / self.shares[length])
        self._asked[chosen] += 1
        return chosen


class RetrievalBatches:
    """Batches of about ``tokens`` tokens, in the order in which they were asked for.

    Args:
        model: whose tokeniser is used.
        texts: the folder of prose and words.
        tokens: of a batch.
        lengths: of its samples.
        first: number of the first batch; the same numbers have the same seeds.
        workers: processes that make them.
    """

    def __init__(self, model: str, texts: Path, tokens: int, lengths: Lengths, first: int, workers: int) -> None:
        self.lengths = lengths
        self._made_of, self._tokens, self._number = (model, texts), tokens, first
        # Not forked: this process has threads and a CUDA context.
        self._pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
        self._queue: deque[tuple[int, Future[list[Tokens]]]] = deque()

    def begin(self, progress: float) -> None:
        """Waits until the first batch is made, which takes as long as the processes take to start."""
        self._ask(progress)
        self._queue[0][1].result()

    def next(self, progress: float) -> tuple[int, list[Tokens]]:
        """Length and samples, when ``progress`` (0 to 1) of the time has passed."""
        self._ask(progress)
        length, samples = self._queue.popleft()
        return length, samples.result()

    def _ask(self, progress: float) -> None:
        while len(self._queue) < AHEAD:
            length = self.lengths.next(progress)
            count = max(self._tokens // length, 1)
            made = self._pool.submit(retrieval_batch, *self._made_of, length, count, f"train/{self._number}")
            self._queue.append((length, made))
            self._number += 1

    def close(self) -> None:
        """Ends the processes; what they have not begun is dropped."""
        self._pool.shutdown(cancel_futures=True)


def chat_batches(chats: Sequence[Tokens], tokens: int, rng: random.Random) -> Iterator[list[Tokens]]:
    """Batches of chats of about the same length, of at most ``tokens`` tokens with their padding; shuffled epochs
    without end."""
    while True:
        ordered = sorted(chats, key=lambda chat: (len(chat.ids) // 16, rng.random()))
        batches = list(in_order(ordered, tokens))
        rng.shuffle(batches)
        yield from batches


def in_order(chats: Sequence[Tokens], tokens: int) -> Iterator[list[Tokens]]:
    """Batches of chats as they come, at most ``tokens`` tokens each with their padding."""
    batch: list[Tokens] = []
    longest = 0
    for chat in chats:
        longest = max(longest, len(chat.ids))
        if batch and longest * (len(batch) + 1) > tokens:
            yield batch
            batch, longest = [], len(chat.ids)
        batch.append(chat)
    if batch:
        yield batch
