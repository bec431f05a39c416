"""Decode steps of a full batch while its prompts are copied below the device, and without copies.

The batch is prefilled without copies. Then, a few sequences at a time, steps alone alternate with steps during copies
of those sequences, so that both see the same lengths.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from benchmarks.sweeps.engines import greedy, random_prompt, step
from shadowkv.engine.engine import Engine

ROUNDS = 8
"""Parts of the batch that are copied one after another."""

ANSWER = 32
"""Tokens that a sequence has room for, as a multiple of the steps that are measured alone."""


@dataclass
class Steps:
    """Decode steps of one kind: their number, tokens, and seconds."""

    count: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def take(self, engine: Engine) -> None:
        """One more step; raises ValueError if a request ends with it."""
        start = time.monotonic()
        outputs = step(engine)
        self.seconds += time.monotonic() - start
        self.count += 1
        self.tokens += sum(len(one.token_ids) for one in outputs)
        if any(one.finish_reason for one in outputs):
            raise ValueError("a request ended before the batch was full or its copies were made: raise --output")

    def figures(self) -> dict[str, float | None]:
        """Columns of a row."""
        return {"wall_s": self.seconds, "output_tokens_per_s": self.tokens / self.seconds}


def copies(engine: Engine, document: int, output: int) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """Columns of two rows: for steps alone, and for steps during copies.

    Args:
        document: tokens of each prompt; the prompts have nothing in common.
        output: steps to measure alone. During copies there are as many as these take.
    """
    draw, batch, prefixes = random.Random(0), engine.config.max_num_seqs, engine.scheduler.prefix_cache
    for number in range(batch):
        prompt = random_prompt(engine, document, draw)
        engine.add_request(f"copied {number}", prompt, greedy(engine.cache.max_model_len - document))
    with prefixes.on_the_device_alone():
        while len(engine.scheduler.running) < batch:
            Steps().take(engine)
    alone, beside, before = Steps(), Steps(), engine.stats().prefixes
    for number in range(ROUNDS):
        for _ in range(-(-output // ROUNDS)):
            alone.take(engine)
        for one in engine.scheduler.running[number::ROUNDS]:
            assert one.request.prompt is not None, "reuse is on"
            prefixes.computed(one.sequence, one.request.prompt)
        while engine.settling:
            beside.take(engine)
    for name, tier in engine.stats().prefixes.items():
        if name != "device":
            print(f"{name}: {tier.copied_bytes - before[name].copied_bytes} bytes, {tier.refused} copies refused")
    print(f"{alone.count} steps alone, {beside.count} beside copies", flush=True)
    return alone.figures(), beside.figures()
