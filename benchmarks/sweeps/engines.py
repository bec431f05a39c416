"""What sweeps of whole engines share: their command line, an engine for each combination, and how it is driven."""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

from benchmarks.sweeps.synthetic import replay
from shadowkv.engine.config import DEFAULT_MODEL, EngineConfig, add_policies
from shadowkv.engine.engine import Engine
from shadowkv.engine.outputs import TokenOutput
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.engine.warmup import warm_up
from shadowkv.eval.provenance import provenance
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.load_settings import QUANTIZATIONS
from shadowkv.models.loader import LoadedModel
from shadowkv.settings import add_flag

ENGINE = "shadowkv"

PROFILED_STEPS = 4

Cell = dict[str, Any]


def sweep_parser(text: str | None) -> argparse.ArgumentParser:
    """A command line with the flags of all sweeps; ``text`` is the module's docstring."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="CSV file")
    parser.add_argument("--model", default="llama-3.1-8b", help="(default: %(default)s)")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"), help="(default: %(default)s)")
    add_policies(parser, "full", "turbo")
    parser.add_argument("--prefill", nargs="+", default=["auto"], choices=("dense", "sparse", "auto"))
    text = "of the weights; none: as files have them (default: %(default)s)"
    parser.add_argument("--quantization", nargs="+", default=["none"], choices=QUANTIZATIONS, help=text)
    parser.add_argument(
        "--replay",
        nargs="+",
        type=densities_of,
        default=[{}],
        metavar="DENSITY",
        help="blocks of sparse prefills are random ones, as large a share: of every prompt (0.1), or by its tokens "
        "(61440=0.06,124928=0.03)",
    )
    parser.add_argument("--skip-warmup", action="store_true", help="engines compile and plan as they go")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="(default: %(default)s)")
    return parser


def add_model_arguments(parser: argparse._ActionsContainer) -> None:
    """The flags of a model whose answers count, perhaps with an adapter."""
    parser.add_argument("--model", default=DEFAULT_MODEL, help="(default: %(default)s)")
    for name in ("adapter", "rope_theta", "hf_overrides", "load_format", "device"):
        add_flag(parser, EngineConfig, name)


def model_of(args: argparse.Namespace) -> dict[str, Any]:
    """What these say, as fields of an engine's config."""
    names = ("model", "adapter", "rope_theta", "hf_overrides", "load_format", "device")
    return {name: getattr(args, name) for name in names}


def densities_of(text: str) -> dict[int | None, float]:
    """Densities by prompt length, None for any; raises ArgumentTypeError for anything else."""
    densities: dict[int | None, float] = {}
    try:
        for part in text.split(","):
            tokens, named, density = part.rpartition("=")
            densities[int(tokens) if named else None] = float(density)
    except ValueError:
        densities[None] = 0.0
    if not all(0 < density <= 1 for density in densities.values()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no share over 0 and up to 1, as 0.1, or by prompt length, as 61440=0.1,124928=0.05"
        )
    return densities


def replayed_density(densities: dict[int | None, float], tokens: int) -> float | None:
    """The density for a prompt."""
    return densities.get(tokens, densities.get(None))


def replay_blocks(engine: Engine, density: float | None) -> None:
    """Gives sparse prefills of ``engine`` their blocks from now on, or lets them choose."""
    if engine.cache.spec.prefill == "sparse":
        engine.runner.collective_rpc(replay, [], density)


def combinations(args: argparse.Namespace) -> Iterator[Cell]:
    """First columns of the requested rows, engine by engine."""
    for quantization, prefill, kv in itertools.product(args.quantization, args.prefill, args.kv):
        yield {"engine": ENGINE, "kv": kv, "prefill": prefill, "quantization": quantization}


def config_of(args: argparse.Namespace, cell: Cell, **settings: Any) -> EngineConfig:
    """Config of a combination's engine; ``settings`` are further fields of it."""
    chosen = {
        "prefill": cell["prefill"],
        "quantization": None if cell["quantization"] == "none" else cell["quantization"],
    }
    if args.load_format == "dummy" and settings.get("max_model_len"):
        settings["rope_theta"] = 1e7  # random weights were not trained for any context
    shared = {name: getattr(args, name) for name in ("model", "load_format", "device", "dtype", "skip_warmup")}
    return EngineConfig(kv=cell["kv"], **{"max_cached_seqs": 0, **settings}, **shared, **chosen)


def opened(config: EngineConfig, loaded: LoadedModel | None = None) -> Engine:
    """An engine as a server starts it."""
    engine = Engine(config, loaded)
    warm_up(engine)
    return engine


def engine_of(args: argparse.Namespace, cell: Cell, **settings: Any) -> Engine:
    """The engine of a combination, which replays the blocks of sparse prefills if requested."""
    engine = opened(config_of(args, cell, **settings))
    replay_blocks(engine, cell.get("replayed_density"))
    return engine


def about(engine: Engine) -> Cell:
    """Last columns of a row."""
    return about_spec(engine.cache.spec, provenance()["gpu"] or "cpu")


def about_spec(spec: KVSpec, device: str) -> Cell:
    """The same of a policy without an engine."""
    origin, text = provenance(), json.dumps(spec.as_dict(), separators=(",", ":"))
    return {"commit": origin["commit"], "command": origin["command"], "device": device, "spec": text}


def in_fresh_process(function: Callable[..., None], *args: Any) -> bool:
    """Calls ``function`` in a process where nothing has been compiled, planned or kept; False if it died, lacked memory
    or its engine was refused, which is printed."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        try:
            process.submit(function, *args).result()
        except (MemoryError, torch.OutOfMemoryError, BrokenProcessPool, ValueError, OSError) as error:
            print(f"error: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            return False
    return True


def random_prompt(engine: Engine, tokens: int, draw: random.Random) -> list[int]:
    """Token ids from the whole vocabulary."""
    return draw.choices(range(engine.model_config.vocab_size), k=tokens)


def greedy(tokens: int) -> SamplingParams:
    """Greedy, up to exactly ``tokens`` tokens."""
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def step(engine: Engine) -> list[TokenOutput]:
    """A step of the engine; raises RuntimeError for a request that failed."""
    outputs = engine.step()
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(f"request {output.request_id}: {output.error}")
    return outputs


def window(engine: Engine, steps: int, count: int) -> float:
    """Seconds per step of ``count`` sequences, over ``steps`` steps."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    tokens = sum(len(engine.step()) for _ in range(steps))
    if on_gpu:
        torch.cuda.synchronize()
    assert tokens == count * steps, "a sequence has left"
    return (time.perf_counter() - start) / steps


def profile(engine: Engine) -> dict[str, Any]:
    """Device time of a step by kernel, in ms, and the share of the time in which at least one of them ran."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        for _ in range(PROFILED_STEPS):
            engine.step()
        torch.cuda.synchronize()
    events = [event for event in trace.events() if event.device_type == torch.profiler.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    kernels: dict[str, list[float]] = defaultdict(list)
    end, ran = events[0].time_range.start, 0.0
    for event in events:  # some run concurrently
        kernels[event.name[:120]].append(event.device_time)
        ran += max(0.0, event.time_range.end - max(end, event.time_range.start))
        end = max(end, event.time_range.end)
    total = sum(map(sum, kernels.values())) / PROFILED_STEPS / 1e3
    table = [
        {"kernel": name, "ms_per_step": sum(times) / PROFILED_STEPS / 1e3, "calls": len(times) / PROFILED_STEPS}
        for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))
    ]
    return {"device_ms_per_step": total, "busy": ran / (end - events[0].time_range.start), "kernels": table[:40]}


def seconds_to_first_token(engine: Engine, prompt: list[int]) -> float:
    """Time to first token of a request that runs alone."""
    start = time.perf_counter()
    engine.add_request("alone", prompt, greedy(1))
    while not step(engine):
        pass
    return time.perf_counter() - start
