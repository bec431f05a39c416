"""Functions that sweeps of whole engines share: flags, opening an engine for each combination of flags, and running its
steps."""

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
from typing import Any, NamedTuple

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
    """Returns a parser with the flags of all sweeps. ``text`` is the sweep's docstring."""
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
    """Adds the flags of a model with trained weights, whose answers are measured. It may have an adapter."""
    parser.add_argument("--model", default=DEFAULT_MODEL, help="(default: %(default)s)")
    for name in ("adapter", "rope_theta", "hf_overrides", "load_format", "device"):
        add_flag(parser, EngineConfig, name)


def model_of(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the values of these flags, as fields of an engine's config."""
    names = ("model", "adapter", "rope_theta", "hf_overrides", "load_format", "device")
    return {name: getattr(args, name) for name in names}


def densities_of(text: str) -> dict[int | None, float]:
    """Parses ``--replay``: densities by prompt length, where None means any length. Raises ArgumentTypeError for
    invalid text."""
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
    """Returns the density for a prompt of ``tokens`` tokens. None if there is none."""
    return densities.get(tokens, densities.get(None))


def replay_blocks(engine: Engine, density: float | None) -> None:
    """From now on, sparse prefills of ``engine`` attend to random blocks of a density. If the density is None, they
    select blocks themselves."""
    if engine.cache.spec.prefill == "sparse":
        engine.runner.collective_rpc(replay, [], density)


def combinations(args: argparse.Namespace) -> Iterator[Cell]:
    """Yields the first columns of the requested rows, for one engine after another."""
    for quantization, prefill, kv in itertools.product(args.quantization, args.prefill, args.kv):
        yield {"engine": ENGINE, "kv": kv, "prefill": prefill, "quantization": quantization}


def config_of(args: argparse.Namespace, cell: Cell, **settings: Any) -> EngineConfig:
    """Returns the config of a combination's engine. ``settings`` are further fields of the config."""
    chosen = {
        "prefill": cell["prefill"],
        "quantization": None if cell["quantization"] == "none" else cell["quantization"],
    }
    if args.load_format == "dummy" and settings.get("max_model_len"):
        settings["rope_theta"] = 1e7  # random weights were not trained for any context
    shared = {name: getattr(args, name) for name in ("model", "load_format", "device", "dtype", "skip_warmup")}
    return EngineConfig(kv=cell["kv"], **{"max_cached_seqs": 0, **settings}, **shared, **chosen)


def opened(config: EngineConfig, loaded: LoadedModel | None = None) -> Engine:
    """Opens an engine, and warms it up as a server does."""
    engine = Engine(config, loaded)
    warm_up(engine)
    return engine


def engine_of(args: argparse.Namespace, cell: Cell, **settings: Any) -> Engine:
    """Opens the engine of a combination. Its sparse prefills attend to random blocks if the combination has a
    density."""
    engine = opened(config_of(args, cell, **settings))
    replay_blocks(engine, cell.get("replayed_density"))
    return engine


def about(engine: Engine) -> Cell:
    """Returns the last columns of a row, which say where it comes from."""
    return about_spec(engine.cache.spec, provenance()["gpu"] or "cpu")


def about_spec(spec: KVSpec, device: str) -> Cell:
    """Returns the columns of ``about`` for a policy without an engine."""
    origin, text = provenance(), json.dumps(spec.as_dict(), separators=(",", ":"))
    return {"commit": origin["commit"], "command": origin["command"], "device": device, "spec": text}


def in_fresh_process(function: Callable[..., None], *args: Any) -> bool:
    """Calls ``function`` in a new process, which has no compiled kernels, plans or caches in memory. Returns False, and
    prints the error, if the process died or ran out of memory, or if the engine's config was refused."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        try:
            process.submit(function, *args).result()
        except (MemoryError, torch.OutOfMemoryError, BrokenProcessPool, ValueError, OSError) as error:
            print(f"error: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            return False
    return True


def random_prompt(engine: Engine, tokens: int, draw: random.Random) -> list[int]:
    """Returns random token ids from the whole vocabulary."""
    return draw.choices(range(engine.model_config.vocab_size), k=tokens)


def greedy(tokens: int) -> SamplingParams:
    """Returns parameters for a greedy answer of exactly ``tokens`` tokens."""
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def step(engine: Engine) -> list[TokenOutput]:
    """Makes a step of the engine. Raises RuntimeError if a request failed."""
    outputs = engine.step()
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(f"request {output.request_id}: {output.error}")
    return outputs


class Window(NamedTuple):
    """Means over some decode steps.

    Attributes:
        seconds: seconds of a step, with its draft steps.
        tokens: new tokens of a step, of all sequences.
    """

    seconds: float
    tokens: float


def window(engine: Engine, steps: int, count: int) -> Window:
    """Measures ``steps`` decode steps of ``count`` sequences."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    outputs = [output for _ in range(steps) for output in engine.step()]
    if on_gpu:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / steps
    left = any(output.finish_reason for output in outputs) or len({output.request_id for output in outputs}) < count
    assert not left, "a sequence has left"
    return Window(seconds, sum(len(output.token_ids) for output in outputs) / steps)


def profile(engine: Engine) -> dict[str, Any]:
    """Returns the device time of a step by kernel, in milliseconds, and the share of the time in which at least one
    kernel ran."""
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
    """Returns the time to first token of a request that runs alone."""
    start = time.perf_counter()
    engine.add_request("alone", prompt, greedy(1))
    while not step(engine):
        pass
    return time.perf_counter() - start
