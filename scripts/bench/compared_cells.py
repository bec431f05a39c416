"""What ``compare_commits.py`` times, in a process for each source tree: cells are opened, timed and closed."""

from __future__ import annotations

import argparse
import functools
import gc
import json
import random
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LAYERS, WARM_UP, STEPS, PAIRS = 16, 64, 24, 5
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": LAYERS, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e7, "eos_token_id": 128001,
}  # fmt: skip
SWEEP = {
    ("full", 61440): 14, ("turbo", 61440): 68, ("turbo-host", 61440): 112,
    ("full", 124928): 7, ("turbo", 124928): 34, ("turbo-host", 124928): 56,
}  # fmt: skip
"""Number of sequences; with values on the host, 39 GiB of pinned memory in each process."""
HIT_RATE, HOST_GIB = 0.72, 45.0
CELLS = {
    "cuda": [("layer", "turbo"), ("prefill", "full"), ("prefill", "turbo"), *(("sweep", *cell) for cell in SWEEP)],
    "cpu": [("cpu", dtype, kv) for kv in ("shadowkv", "turbo") for dtype in ("bfloat16", "float32")],
}
Timing = Callable[[], dict[str, float]]


def mix(cache: Any) -> None:
    """Leaves free blocks in random order, as caches of 79526a5 do by themselves: both trees read in the same order."""
    for tier in getattr(cache.store, "tiers", {}).values():
        blocks = tier.allocate(tier.free_blocks)
        random.Random(0).shuffle(blocks)
        tier.release(blocks)


def open_layer(kv: str, share: float) -> Timing:
    """Attention of one layer in a decode step over 48 sequences of 61,440 tokens, milliseconds."""
    import bench_attention_layer as bench

    context, batch, budget = bench.CASES[0]
    cache = bench.make_cache(kv, context, batch, budget, 2.0)
    mix(cache)
    sequences = bench.fill(cache, context, batch)
    return lambda: {f"layer {kv} {batch}x{context} ms": bench.measure(cache, sequences, None)[0]}


def open_prefill(kv: str, share: float) -> Timing:
    """Prefill of 61,440 tokens through three layers, tokens per second."""
    import bench_prefill as bench

    tokens = 61440
    cache = bench.make_cache(kv, tokens)
    mix(cache)
    model = bench.model()
    if hasattr(bench, "Runner"):  # as of 79526a5
        model = bench.Runner(model, cache)
    bench.run(cache, model, tokens)
    return lambda: {f"prefill {kv} {tokens} tokens/s": tokens / bench.run(cache, model, tokens)}


def open_sweep(kv: str, context: int, share: float) -> Timing:
    """Whole engine steps, tokens per second."""
    import throughput_sweep as sweep
    import torch

    count, loaded = SWEEP[kv, context], load_llama()
    sweep.UTILIZATION = share
    args = argparse.Namespace(
        model=loaded.name, load_format="dummy", windows=(WARM_UP + PAIRS * STEPS) // STEPS, steps=STEPS,
        hit_rate=HIT_RATE, host_memory_gib=HOST_GIB, enforce_eager=False, synthetic_prefill=True,
        quantization=None,
    )  # fmt: skip
    config = sweep.config_of(args, kv, count, context)
    new = sweep.new_tokens(args)
    if hasattr(sweep, "SyntheticPrefill"):  # as of 79526a5
        sweep.SyntheticPrefill.computed = True
        engine = sweep.Engine(config, loaded, sweep.SyntheticPrefill)
        for tier in (engine.cache.store.device, engine.cache.store.host):
            tier.shuffle(seed=0)
        sweep.fill(engine, count, context, new)
        if engine.cache.fetching is not None:
            sweep.ScriptedSelection(engine.cache, context - 64, HIT_RATE)
    else:
        engine = sweep.Engine(config, loaded)
        mix(engine.cache)
        if engine.cache.fetches is not None:
            engine.cache.selection_hook = sweep.ScriptedSelection(engine.cache, context - 64, HIT_RATE)
        draw = random.Random(0)
        sweep.begin(
            engine, [draw.choices(range(1000), k=context - draw.randrange(64)) for _ in range(count)], new, True
        )

    def timed(steps: int) -> dict[str, float]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        tokens = sum(len(engine.step()) for _ in range(steps))
        torch.cuda.synchronize()
        assert tokens == count * steps, "a sequence has left"
        return {f"sweep {kv} {context}": tokens / (time.perf_counter() - start)}

    timed(WARM_UP)
    return lambda: timed(STEPS)


@functools.cache
def load_llama() -> Any:
    """The model of the sweeps."""
    from shadowkv.engine.config import EngineConfig
    from shadowkv.engine.startup.loading import load_from_config

    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA))
        return load_from_config(EngineConfig(model=folder, load_format="dummy", rope_theta=1e7))


def open_cpu(dtype: str, kv: str, share: float) -> Timing:
    """48 prompts on CPUs: prompt and new tokens per second, and new ones alone."""
    import cpu_serve

    def timed() -> dict[str, float]:
        found = cpu_serve.run_ours(dtype, kv)
        return {f"cpu {kv} {dtype} {name}": found[name] for name in ("tokens_per_s", "decode_tokens_per_s")}

    return timed


def serve(tree: Path, share: float, pipe: Connection) -> None:
    """A tree's process: opens the cell that it is sent, times it when it is sent None, and closes it at the next."""
    # An installed package from another tree would provide modules that this one has not built.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
    sys.path[:0] = [str(tree), str(tree / "scripts"), str(tree / "scripts/bench")]
    import torch

    import shadowkv

    shadowkv.__path__.append(str(tree))  # for shadowkv.models and shadowkv.eval, where nothing is installed
    assert Path(shadowkv.__file__).is_relative_to(tree), shadowkv.__file__
    timing: Timing | None = None
    while True:
        try:
            cell = pipe.recv()
        except EOFError:
            return
        try:
            if cell is None:
                assert timing is not None
                pipe.send(timing())
                continue
            timing = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if cell:
                timing = {"layer": open_layer, "prefill": open_prefill, "sweep": open_sweep, "cpu": open_cpu}[cell[0]](
                    *cell[1:], share
                )
            pipe.send({})
        except (MemoryError, RuntimeError, ValueError):  # does not fit; other errors end the process, which is noticed
            traceback.print_exc()
            pipe.send(None)
