"""Runs our engine on a trace's arrivals without a server. It makes steps in a loop, and adds requests between steps."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.sweeps import engines
from shadowkv.bench.arrivals import Arrival
from shadowkv.bench.serving_stats import Record
from shadowkv.engine.engine import Engine


def drive(engine: Engine, arrivals: Sequence[Arrival], vocab_size: int) -> tuple[list[Record], float, float]:
    """Returns records in order of arrival, and the times at which the run began and ended.

    A request counts as sent at its arrival time, even if it arrives during a step and has to wait. Tokens count as
    received when their step has returned. Raises RuntimeError for a request that fails.
    """
    prompts = [arrival.prompt(vocab_size) for arrival in arrivals]
    start, added = time.perf_counter(), 0
    records = [Record(start + arrival.timestamp, arrival.input_length) for arrival in arrivals]
    while added < len(arrivals) or engine.has_work:
        while added < len(arrivals) and records[added].sent <= time.perf_counter():
            engine.add_request(str(added), prompts[added], engines.greedy(arrivals[added].output_length))
            added += 1
        if not engine.has_work:
            time.sleep(max(0.0, records[added].sent - time.perf_counter()))
            continue
        outputs = engines.step(engine)
        now = time.perf_counter()
        for output in outputs:
            record = records[int(output.request_id)]
            if output.token_ids:
                record.chunks.append(now)
                record.output_tokens += len(output.token_ids)
            record.done = output.finish_reason is not None
    return records, start, time.perf_counter()
