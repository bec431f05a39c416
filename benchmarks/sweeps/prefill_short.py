"""Times to first token of short prompts: the default policy against ``full``, alternating on one model's weights."""

from __future__ import annotations

import argparse
import random
import statistics

from benchmarks.sweeps.engines import ENGINE, about, config_of, opened, random_prompt, seconds_to_first_token
from benchmarks.sweeps.rows import Rows
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.startup.loading import load_from_config

CONTEXTS = [256, 512, 1024, 2048, 4096, 8192]

SHARE = 0.5
"""Share of the device's memory that weights and the first of the two engines take."""


def compare(args: argparse.Namespace, contexts: list[int], repeats: int, rows: Rows) -> None:
    """A row for each length: medians of ``repeats`` prompts given to both engines, after an untimed one.

    The engines have their defaults, including the model's longest sequences.
    """
    cell = {"kv": EngineConfig.kv, "prefill": EngineConfig.prefill, "quantization": "none"}
    default, full = config_of(args, cell), config_of(args, cell | {"kv": "full"}, gpu_memory_utilization=SHARE)
    loaded, draw = load_from_config(default), random.Random(0)
    of_full = opened(full, loaded)
    engines = {"ttft_s": opened(default, loaded), "full_ttft_s": of_full}
    for context in contexts:
        row = {"engine": ENGINE, "kv": EngineConfig.kv, "context": context}
        if rows.has(row):
            continue
        times: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(1 + repeats):
            prompt = random_prompt(of_full, context, draw)
            for name, engine in engines.items():
                times[name].append(seconds_to_first_token(engine, prompt))
        medians = {name: statistics.median(values[1:]) for name, values in times.items()}
        ratio = medians["ttft_s"] / medians["full_ttft_s"]
        rows.add(row | medians | {"ratio": ratio} | about(engines["ttft_s"]))
