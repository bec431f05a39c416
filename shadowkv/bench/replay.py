"""Replays a trace: sends each request to a server at its arrival time."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Sequence

from tqdm import tqdm

from shadowkv.bench.arrivals import Arrival
from shadowkv.bench.client import CompletionClient, Refused
from shadowkv.bench.serving_stats import Record

PROGRESS_SECONDS = 0.5
"""Seconds between updates of the progress bar. An update at each event would slow the client down."""


def completion_body(model: str, arrival: Arrival, vocab_size: int, ignore_eos: bool = True) -> bytes:
    """Returns the JSON of a request for a greedy, streamed completion with an arrival's prompt and output length."""
    body = {
        "model": model,
        "prompt": arrival.prompt(vocab_size),
        "max_tokens": arrival.output_length,
        "temperature": 0.0,
        "ignore_eos": ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body, separators=(",", ":")).encode()


class Replay:
    """One run of requests against one server.

    Attributes:
        records: records of the requests sent so far, in order of sending.
        start: time at which the run began, by the clock of the records' times.
        lags: seconds by which the client was late with each request. Waiting for ``max_concurrency`` does not count.

    Args:
        max_concurrency: maximum number of requests in flight. Further requests wait, and their latencies do not include
            this wait.
    """

    def __init__(self, client: CompletionClient, arrivals: Sequence[Arrival], max_concurrency: int | None = None):
        self.client, self.arrivals, self.records = client, arrivals, list[Record]()
        self.clients = min(len(arrivals), max_concurrency or len(arrivals))
        self.start, self.lags = 0.0, list[float]()
        self._free = asyncio.Semaphore(self.clients)

    async def run(self, model: str, vocab_size: int, ignore_eos: bool = True) -> None:
        """Sends all requests and waits until every answer has ended, successfully or not. If this coroutine is
        cancelled, it aborts the requests in flight."""
        # Bodies are made before the run: making a long one takes the client as long as reading several tokens.
        bodies = [completion_body(model, arrival, vocab_size, ignore_eos) for arrival in self.arrivals]
        gc.collect()
        gc.freeze()  # otherwise a garbage collection would walk all bodies between two tokens
        self.start = time.perf_counter()
        tasks, progress = [], asyncio.create_task(self._show_progress())
        try:
            for arrival, body in zip(self.arrivals, bodies, strict=True):
                await asyncio.sleep(self.start + arrival.timestamp - time.perf_counter())
                self.lags.append(time.perf_counter() - self.start - arrival.timestamp)
                tasks.append(asyncio.create_task(self._send(arrival, body)))
            await asyncio.gather(*tasks)
        finally:
            for task in (*tasks, progress):
                task.cancel()
            await asyncio.gather(*tasks, progress, return_exceptions=True)
            self.client.close()
            gc.unfreeze()

    async def _send(self, arrival: Arrival, body: bytes) -> None:
        async with self._free:
            record = Record(time.perf_counter(), arrival.input_length)
            self.records.append(record)
            try:
                await self.client.stream(body, record)
            except Refused as error:
                record.error = str(error)

    async def _show_progress(self) -> None:
        expected = sum(arrival.output_length for arrival in self.arrivals)
        with tqdm(total=expected, unit="tok", disable=None, leave=False) as bar:
            while True:
                await asyncio.sleep(PROGRESS_SECONDS)
                bar.set_postfix_str(f"{sum(r.done for r in self.records)} of {len(self.arrivals)} requests done", False)
                bar.update(sum(record.tokens for record in self.records) - bar.n)
