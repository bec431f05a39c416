"""Runs requests in a vLLM engine. The figures are defined as in the sweeps ``prefill`` and ``mixed``."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

LARGEST_ID = 120000
WARM_UP = 16384
"""Maximum number of prompt tokens, in at most 16 requests, of the warm-up before a case."""

SETTLING, MEASURED = 8, 64
"""Number of steps of a whole batch before timing begins, and number of timed steps."""


class Driver:
    """Runs requests of random token ids. ``sampling`` returns the engine's sampling parameters for a number of
    tokens."""

    def __init__(self, engine: Any, sampling: Callable[[int], Any]) -> None:
        self.engine, self.sampling, self._runs, self._draw = engine, sampling, 0, random.Random(1)

    def draw(self, tokens: int) -> list[int]:
        """Returns a prompt of ``tokens`` random token ids."""
        return self._draw.choices(range(100, LARGEST_ID), k=tokens)

    def run(self, tokens: int, outputs: list[int]) -> tuple[float, list[list[float]]]:
        """Runs a request with a prompt of ``tokens`` random tokens for each number of answer tokens in ``outputs``.
        Returns the times of ``offer``."""
        return self.offer([self.draw(tokens) for _ in outputs], outputs)

    def offer(self, prompts: list[list[int]], outputs: list[int]) -> tuple[float, list[list[float]]]:
        """Adds a request for every prompt, and runs the engine until all have ended. Returns the time before the first
        request was added, and for each request the times at which its tokens came."""
        self._runs += 1
        times: dict[str, list[float]] = {f"{self._runs}-{number}": [] for number in range(len(outputs))}
        start = time.perf_counter()
        for name, prompt, output in zip(times, prompts, outputs, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": prompt}, self.sampling(output))
        while self.engine.has_unfinished_requests():
            done = self.engine.step()
            now = time.perf_counter()
            for one in done:
                times[one.request_id] += [now] * len(one.outputs[0].token_ids)
        came = list(times.values())
        if [len(one) for one in came] != outputs:
            raise RuntimeError(f"answers of {[len(one) for one in came]} tokens instead of {outputs}")
        return start, came

    def prefill(self, context: int, repeats: int) -> dict[str, Any]:
        """Returns the columns of ``prefill.csv`` for a prompt length."""
        seconds = []
        for _ in range(1 + repeats):
            start, ((first,),) = self.run(context, [1])
            seconds.append(first - start)
        return {"context": context, "ttft_s": statistics.median(seconds[1:]), "first_ttft_s": seconds[0]}

    def mixed(self, requests: int, tokens: int, output: int) -> dict[str, Any]:
        """Returns the columns of ``mixed.csv`` for a case."""
        few = max(1, min(requests, 16, WARM_UP // tokens))
        self.run(tokens, [min(8, output)] * few)
        start, came = self.run(tokens, [output] * requests)
        wall = max(one[-1] for one in came) - start
        return {
            "requests": requests,
            "input": tokens,
            "output": output,
            "wall_s": wall,
            "output_tokens_per_s": requests * output / wall,
            "ttft_mean_s": statistics.mean(one[0] - start for one in came),
            "tpot_ms": 1e3 * statistics.mean((one[-1] - one[0]) / (output - 1) for one in came) if output > 1 else None,
        }

    def fitting(self, tokens: int) -> int:
        """Returns how many sequences of ``tokens`` tokens can run at once."""
        config = self.engine.vllm_config
        blocks = -(-tokens // config.cache_config.block_size)
        return min((config.cache_config.num_gpu_blocks - 1) // blocks, config.scheduler_config.max_num_seqs)

    def decode(self, batch: int, context: int) -> dict[str, Any]:
        """Returns the columns of ``decode.csv`` for a batch. The engine makes up keys and values."""
        # Requests start one after the other, and each takes two steps to start. So earlier ones have longer answers.
        outputs = [SETTLING + MEASURED + 8 + 2 * (batch - 1 - number) for number in range(batch)]
        _, came = self.run(context, outputs)
        together = sorted(set.intersection(*map(set, came)))[SETTLING : SETTLING + MEASURED + 1]
        if len(together) <= MEASURED:
            raise RuntimeError(f"{batch} x {context} never decoded together for long enough: they do not fit")
        step = (together[-1] - together[0]) / MEASURED
        return {"context": context, "batch": batch, "step_ms": 1e3 * step, "decode_tokens_per_s": batch / step}
