"""Decode throughput of KV policies at their largest batch, through ``Engine.step``.

One cell per policy and context: its engine is built, as many sequences as fit are put in it, and decode steps are
timed in windows; then a few steps are profiled. Cells that have a JSON file in ``--out`` already are not run again.
Lengths are ragged and pages are shuffled, so that sequences seal at different steps and no page is beside its
neighbour. ``--synthetic-prefill`` computes the first sequence's prompt, for its time, and stores random keys and
values for the others.

    python scripts/throughput_sweep.py --model llama-3.1-8b --load-format dummy --context 61440 124928 \\
        --kv full shadowkv turbo turbo-host --batch auto --synthetic-prefill --out results
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import random
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
from scripted_selection import ScriptedSelection
from throughput_plots import plot
from torch import Tensor

from shadowkv import SamplingParams
from shadowkv.engine.config import EngineConfig, policy_name
from shadowkv.engine.engine import Engine
from shadowkv.engine.loading import load_from_config
from shadowkv.engine.runner import Forks, Runner
from shadowkv.engine.sizing import GIB, prefill_bytes
from shadowkv.eval.provenance import provenance
from shadowkv.kvcache.layout import Layout
from shadowkv.kvcache.parts import build_parts
from shadowkv.kvcache.presets import POLICY_HELP, preset
from shadowkv.kvcache.sequence import Sequence
from shadowkv.models.loader import LoadedModel
from shadowkv.plan.memory import largest_batch, sequence_bytes

COLUMNS = [
    "kv",
    "context",
    "batch",
    "decode_tokens_per_s",
    "step_ms",
    "ttft_s",
    "device_gib",
    "host_gib",
    "h2d_mb_per_step",
    "hit_rate",
    "status",
]
UTILIZATION = 0.99
"""Of the GPU's memory; the rest is left for activations, workspaces and captured graphs."""

PROFILED_STEPS = 4


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="(default: %(default)s)")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"), help="(default: %(default)s)")
    parser.add_argument("--context", type=int, nargs="+", default=[61440], help="tokens (default: 61440)")
    parser.add_argument("--kv", nargs="+", default=["full", "shadowkv", "turbo"], type=policy_name, help=POLICY_HELP)
    parser.add_argument("--batch", nargs="+", default=["auto"], help="sequences, or auto for as many as fit")
    parser.add_argument("--windows", type=int, default=3, help="timed windows (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=64, help="decode steps of a window (default: %(default)s)")
    parser.add_argument("--host-memory-gib", type=float, help="pinned memory (default: 85 %% of what is free)")
    parser.add_argument(
        "--synthetic-prefill", action="store_true", help="random keys and values after the first prompt"
    )
    parser.add_argument(
        "--hit-rate",
        type=float,
        metavar="SHARE",
        help="where values are on the host: share of the selected chunks that the step before selected too",
    )
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    args = parser.parse_args()
    if args.hit_rate is not None and not 0 <= args.hit_rate <= 1:
        parser.error(f"--hit-rate {args.hit_rate} must be a share from 0 to 1")
    args.out.mkdir(parents=True, exist_ok=True)
    loaded = None
    for context in args.context:
        for kv in args.kv:
            for batch in args.batch:
                name = f"{Path(args.model).name}_{kv}_{context}_{batch}"
                path = args.out / (re.sub(r"[^\w.-]", "_", name) + ".json")
                if path.exists():
                    continue
                if loaded is None:
                    loaded = load_from_config(config_of(args, kv, 1, max(args.context)))
                cell = measure(args, loaded, kv, context, batch)
                path.write_text(json.dumps(cell, indent=1) + "\n")
                print(" ".join(f"{name}={show(cell[name])}" for name in COLUMNS), flush=True)
                gc.collect()
                torch.cuda.empty_cache()
    summarise(args.out)
    return 0


def config_of(args: argparse.Namespace, kv: str, batch: int, context: int) -> EngineConfig:
    """The engine of a cell."""
    return EngineConfig(
        model=args.model,
        load_format=args.load_format,
        kv=kv,
        max_num_seqs=batch,
        max_cached_seqs=0,
        max_model_len=context + new_tokens(args),
        gpu_memory_utilization=UTILIZATION,
        host_memory_gib=args.host_memory_gib or 0.85 * psutil.virtual_memory().available / GIB,
        enforce_eager=args.enforce_eager,
        # Random weights have no context that they were made for: any base rotates as fast.
        rope_theta=1e7 if args.load_format == "dummy" else None,
    )


def new_tokens(args: argparse.Namespace) -> int:
    """Tokens that a sequence gains at the most: warm-up, windows and profile."""
    return int((args.windows + 1) * args.steps + PROFILED_STEPS + 64)


def measure(args: argparse.Namespace, loaded: LoadedModel, kv: str, context: int, batch: str) -> dict[str, Any]:
    """One cell; what does not fit is a row that says so."""
    cell: dict[str, Any] = dict.fromkeys(COLUMNS) | {"model": args.model, "kv": kv, "context": context, "status": "ok"}
    cell["about"] = provenance() | {"synthetic_prefill": args.synthetic_prefill}
    try:
        count = fitting(args, loaded, kv, context) if batch == "auto" else int(batch)
        cell["batch"] = count
        if not count:
            raise MemoryError("not one sequence fits")
        runner = SyntheticPrefill if args.synthetic_prefill else Runner
        engine = Engine(config_of(args, kv, count, context), loaded, runner)
        cell["spec"] = asdict(engine.cache.spec)
        cell["notes"] = engine.notes
        cell["backends"] = engine.cache.ops.backends
        cell |= run(args, engine, count, context)
    except (MemoryError, torch.OutOfMemoryError) as error:
        cell["status"] = f"out of memory: {str(error).splitlines()[0]}"
    return cell


def fitting(args: argparse.Namespace, loaded: LoadedModel, kv: str, context: int) -> int:
    """Sequences that both tiers hold, as the engine counts."""
    shape, dtype = loaded.config.shape, next(loaded.model.parameters()).dtype
    spec = preset(kv).resolve(shape)
    capacity = context + new_tokens(args)
    layout = Layout(spec, shape, dtype, build_parts(spec, shape, dtype), capacity)
    free, total = torch.cuda.mem_get_info()
    free -= (1 - UTILIZATION) * total + prefill_bytes(loaded.config, capacity, dtype) + layout.state_bytes
    host = config_of(args, kv, 1, context).host_memory_gib
    assert host is not None
    return largest_batch(sequence_bytes(layout, capacity), int(free), int(host * GIB)).both


def run(args: argparse.Namespace, engine: Engine, count: int, context: int) -> dict[str, Any]:
    """Times the steps of an engine that it fills."""
    for tier in (engine.cache.store.device, engine.cache.store.host):
        tier.shuffle(seed=0)
    torch.cuda.synchronize()
    ttft = fill(engine, count, context, new_tokens(args))
    if args.hit_rate is not None and engine.cache.fetching is not None:
        ScriptedSelection(engine.cache, context - 64, args.hit_rate)
    for _ in range(args.steps):
        engine.step()
    windows = []
    torch.cuda.synchronize()
    before = engine.stats().fetches
    for _ in range(args.windows):
        torch.cuda.synchronize()
        start = time.perf_counter()
        tokens = sum(len(engine.step()) for _ in range(args.steps))
        torch.cuda.synchronize()
        assert tokens == count * args.steps, "a sequence has left"
        windows.append((time.perf_counter() - start) / args.steps)
    step = statistics.median(windows)
    stats = engine.stats()
    selected, fetched, moved = (
        getattr(stats.fetches, name) - getattr(before, name) for name in ("selected", "fetched", "fetched_bytes")
    )
    return {
        "decode_tokens_per_s": count / step,
        "step_ms": 1e3 * step,
        "windows_ms": [1e3 * window for window in windows],
        "ttft_s": ttft,
        "device_gib": (torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]) / GIB,
        "device_gib_per_sequence": stats.device_used_bytes / count / GIB + engine.cache.layout.state_bytes / GIB,
        "host_gib": stats.host_used_bytes / GIB,
        "h2d_mb_per_step": moved / (args.windows * args.steps) / 1e6,
        "hit_rate": 1 - fetched / selected if selected else None,
        "profile": profile(engine),
    }


def fill(engine: Engine, count: int, context: int, new: int) -> float:
    """Begins ``count`` sequences of up to ``context`` tokens that gain ``new``; returns the first one's seconds."""
    draw, words = random.Random(0), range(min(1000, engine.model_config.vocab_size))
    prompts = [draw.choices(words, k=context - draw.randrange(64)) for _ in range(count)]
    start = time.perf_counter()
    begin(engine, prompts[:1], new)  # alone, so that its time is that of one prompt
    ttft = time.perf_counter() - start
    begin(engine, prompts[1:], new)
    return ttft


def begin(engine: Engine, prompts: list[list[int]], new: int) -> None:
    """Computes the first of ``new`` tokens of every prompt; raises MemoryError where some do not fit."""
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    there = engine.num_running
    for number, prompt in enumerate(prompts, there):
        engine.add_request(str(number), prompt, params)
    left = len(prompts)
    while left:
        outputs = engine.step(decode=False)
        for output in outputs:
            if output.error is not None:
                raise MemoryError(f"sequence {output.request_id}: {output.error}")
        if not outputs and engine.stats().waiting == left:  # nothing is being computed: nothing will ever end
            raise MemoryError(f"only {engine.num_running} of {there + len(prompts)} sequences fit")
        left -= len(outputs)


class SyntheticPrefill(Runner):
    """After the first prompts, every layer stores random keys and values of the right shapes."""

    computed = False

    def prefill(
        self, work: list[tuple[Sequence, list[int]]], forks: Forks = ()
    ) -> Generator[None, None, tuple[Tensor, list[Tensor]]]:
        """The last tokens' embeddings as hidden states, and their logits."""
        if not self.computed:
            self.computed = True
            return (yield from super().prefill(work, forks))
        for sequence, tokens in work:
            batch = self.cache.prefill_batch([(sequence, len(tokens))])
            block = batch.block(0, len(tokens))
            keys, values = torch.randn_like(batch.keys), torch.randn_like(batch.values)
            for layer in range(self.cache.shape.num_layers):
                self.cache.append(layer, keys, values, block)
                self.cache.finish_prefill(layer, batch)
            self.cache.end_prefill(batch)
        yield
        hidden = [self.model.embed(torch.tensor(tokens[-1:], device=self.cache.device)) for _, tokens in work]
        return self.model.logits(torch.cat(hidden)), hidden


def profile(engine: Engine) -> dict[str, Any]:
    """Device time of a step by kernel, in ms, and the share of the time in which any of them ran."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        for _ in range(PROFILED_STEPS):
            engine.step()
        torch.cuda.synchronize()
    events = [event for event in trace.events() if event.device_type == torch.profiler.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    kernels: dict[str, list[float]] = defaultdict(list)
    end, ran = events[0].time_range.start, 0.0
    for event in events:  # some run beside others
        kernels[event.name[:120]].append(event.device_time)
        ran += max(0.0, event.time_range.end - max(end, event.time_range.start))
        end = max(end, event.time_range.end)
    total = sum(map(sum, kernels.values())) / PROFILED_STEPS / 1e3
    table = [
        {"kernel": name, "ms_per_step": sum(times) / PROFILED_STEPS / 1e3, "calls": len(times) / PROFILED_STEPS}
        for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))
    ]
    return {"device_ms_per_step": total, "busy": ran / (end - events[0].time_range.start), "kernels": table[:40]}


def show(value: Any) -> str:
    """A figure in a few characters."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def summarise(out: Path) -> None:
    """Writes summary.csv and the plots from all cells of the folder."""
    cells = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    with (out / "summary.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows([show(cell[name]) if cell[name] is not None else "" for name in COLUMNS] for cell in cells)
    plot(cells, out)


if __name__ == "__main__":
    sys.exit(main())
