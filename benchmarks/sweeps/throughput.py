"""Decode throughput of KV policies at their largest batch, in an engine without a server.

There is a cell for each policy and context: an engine is opened and filled with as many sequences as fit, decode steps
are timed in windows of ``--steps`` steps, and a few steps are profiled. Cells that already have a JSON file in
``--out`` are not run again. Sequences have slightly different lengths, so they compress pages at different steps.
Memory is fragmented as after long use, so a sequence's pages are in short pieces. ``--synthetic-prefill`` computes the
first sequence's prompt, for its time, and stores random keys and values for the others.

    python -m benchmarks.sweeps.throughput --model llama-3.1-8b --load-format dummy --context 61440 124928 \\
        --kv full shadowkv turbo turbo-host --batch auto --synthetic-prefill --out results

With ``--mix``, a batch has parts whose rows have different lengths. The time of its steps is compared with the sum of
the times of each part alone. In this sum, the floor counts only once: the time that every step takes because it reads
the weights. The floor is measured with one row of ``FLOOR_TOKENS`` tokens. All rows have random keys and values.

    python -m benchmarks.sweeps.throughput --model llama-3-8b-1m --load-format dummy --kv turbo \\
        --mix 1x1000000,40x61440 1x124928,63x2048 --out results

Random weights draft nothing that is right. ``--acceptance`` accepts each drafted token with a given probability if all
before it are accepted (``synthetic_acceptance_rates`` of ``SpeculativeConfig``), for example one that was measured on a
trained model (``benchmarks.serving.speculation``). A step includes its draft steps, and a cell has the number of tokens
that were accepted per draft:

    python -m benchmarks.sweeps.throughput --model llama-3.1-8b --load-format dummy --context 61440 124928 \\
        --kv full full-speculative --acceptance 0.9 --synthetic-prefill --out results
    python -m benchmarks.sweeps.throughput --model qwen3.5-9b --load-format dummy --context 8192 --kv full --batch 8 \\
        --speculative-config '{"method": "mtp", "num_speculative_tokens": 3}' --acceptance 0.8 --out results

With ``--ruler``, prompts are samples of RULER and all of them are computed, with a trained model. A cell then has the
mean score of the answers, too:

    python -m benchmarks.sweeps.throughput --model qwen2.5-coder-1.5b-instruct-q4_k_m.gguf --context 30720 \\
        --kv full fp8 turbo --ruler 301 --out results
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
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.sweeps.engines import PROFILED_STEPS, densities_of, profile, replay_blocks, replayed_density, window
from benchmarks.sweeps.plots import plot_throughput
from benchmarks.sweeps.rows import show
from benchmarks.sweeps.synthetic import ScriptedSelection, begin, endless, scatter
from shadowkv.engine.config import EngineConfig, add_policies
from shadowkv.engine.engine import Engine
from shadowkv.engine.startup.loading import load_from_config
from shadowkv.engine.startup.sizing import largest_batch
from shadowkv.eval.metrics.scoring import score
from shadowkv.eval.provenance import provenance
from shadowkv.eval.records.predictions import Sample
from shadowkv.eval.suites import ruler
from shadowkv.kvcache.memory.free_memory import free_host_bytes
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.models.loader import LoadedModel
from shadowkv.settings import add_flag
from shadowkv.wording import GIB

COLUMNS = ["kv", "context", "batch", "decode_tokens_per_s", "step_ms", "ttft_s", "device_gib", "host_gib"]
COLUMNS += ["h2d_mb_per_step", "hit_rate", "ruler", "status"]
SYNTHETIC = {"rejection_sample_method", "synthetic_acceptance_rates"}
"""What ``--acceptance`` sets in the speculative config."""

UTILIZATION = 0.99
"""Share of the GPU's memory that an engine uses. The rest is left for activations, workspaces and captured CUDA
graphs."""

RAGGED = 64
"""Prompts are up to this many tokens shorter than the context, so that sequences compress pages at different steps."""

FLOOR_TOKENS = 1024

RULER_TOKENS = 128
"""Most tokens of an answer to one of RULER's questions."""


class Part(NamedTuple):
    """``rows`` sequences of ``tokens`` each."""

    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.tokens}"


Mix = tuple[Part, ...]


def mix_of(text: str) -> Mix:
    """Parses the parts of a batch, such as ``1x1000000,40x61440``. Raises ArgumentTypeError for any other text."""
    matches = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", part) for part in text.split(",")]
    parts = tuple(Part(*map(int, match.groups())) for match in matches if match)
    if len(parts) < max(2, len(matches)):
        raise argparse.ArgumentTypeError(f"{text!r} is not two or more parts of rows x tokens, as 1x1000000,40x61440")
    if min(part.tokens for part in parts) <= RAGGED:
        raise argparse.ArgumentTypeError(f"{text!r} has rows of {RAGGED} tokens or fewer")
    return parts


def mix_name(mix: Mix) -> str:
    """Returns the text that ``mix_of`` parses to ``mix``."""
    return ",".join(map(str, mix))


def command() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="(default: %(default)s)")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"), help="(default: %(default)s)")
    for name in ("quantization", "hf_overrides"):
        add_flag(parser, EngineConfig, name)
    parser.add_argument("--context", type=int, nargs="+", help="tokens (default: 61440)")
    add_policies(parser, "full", "shadowkv", "turbo")
    parser.add_argument("--batch", nargs="+", default=["auto"], help="sequences, or auto for as many as fit")
    text = "instead of contexts and batches: rows and tokens of the parts of a batch, as 1x1000000,40x61440"
    parser.add_argument("--mix", type=mix_of, nargs="+", default=[], metavar="PARTS", help=text)
    add_timing_arguments(parser)
    parser.add_argument("--host-memory-gib", type=float, help="pinned memory (default: 85 %% of what is free)")
    parser.add_argument(
        "--synthetic-prefill", action="store_true", help="random keys and values after the first prompt"
    )
    text = "prompts are RULER's samples of this seed, and answers are scored; needs a trained model"
    parser.add_argument("--ruler", type=int, metavar="SEED", help=text)
    text = "where values are on the host: share of the selected chunks that the step before selected too"
    parser.add_argument("--hit-rate", type=float, metavar="SHARE", help=text)
    add_flag(parser, EngineConfig, "speculative_config")
    text = "probability that a drafted token is accepted, whatever the model says (random weights); needs drafts"
    parser.add_argument("--acceptance", type=float, metavar="SHARE", help=text)
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = command()
    args = parser.parse_args(arguments)
    if args.hit_rate is not None and not 0 <= args.hit_rate <= 1:
        parser.error(f"--hit-rate {args.hit_rate} must be a share from 0 to 1")
    if args.acceptance is not None:
        if not 0 <= args.acceptance <= 1:
            parser.error(f"--acceptance {args.acceptance} must be a share from 0 to 1")
        if not any(drafted_tokens(args, kv) for kv in args.kv):
            parser.error("--acceptance needs a policy that drafts (full-speculative), or --speculative-config")
        if given := SYNTHETIC & set(args.speculative_config or {}):
            parser.error(f"--acceptance sets {' and '.join(sorted(given))}: leave it out of --speculative-config")
    if args.ruler is not None:
        check_ruler(parser, args)
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    if args.mix and args.context:
        parser.error("--mix says how long the rows are: leave --context out")
    args.out.mkdir(parents=True, exist_ok=True)
    loaded = None
    for mix in args.mix:
        for kv in args.kv:
            path = mix_path(args.out, args.model, kv, mix)
            if path.exists():
                continue
            if loaded is None:
                loaded = load_from_config(config_of(args, kv, 1, FLOOR_TOKENS))
            cell = measure_mix(args, loaded, kv, mix)
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(cell, indent=1) + "\n")
            times = " ".join(f"{name}={show(ms)}" for name, ms in cell["step_ms"].items())
            print(f"kv={kv} {times} expected={show(cell['expected_ms'])} ratio={show(cell['ratio'])}", flush=True)
            free_memory()
    contexts = args.context or ([] if args.mix else [61440])
    for context in contexts:
        for kv in args.kv:
            for batch in args.batch:
                path = cell_path(args.out, args.model, kv, context, batch)
                if path.exists():
                    continue
                if loaded is None:
                    loaded = load_from_config(config_of(args, kv, 1, max(contexts)))
                cell = measure(args, loaded, kv, context, batch)
                path.write_text(json.dumps(cell, indent=1) + "\n")
                print(" ".join(f"{name}={show(cell[name])}" for name in COLUMNS), flush=True)
                free_memory()
    if contexts:
        summarise(args.out)
    return 0


def check_ruler(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program if ``--ruler`` is given with flags that would change or cut answers."""
    if args.load_format == "dummy" or args.synthetic_prefill or args.mix:
        parser.error("--ruler scores answers of a trained model: without dummy weights, --synthetic-prefill and --mix")
    if args.acceptance is not None or args.hit_rate is not None or args.replay:
        parser.error("--ruler scores answers: --acceptance, --hit-rate and --replay would change them")
    if (args.windows + 1) * args.steps < RULER_TOKENS:
        given = f"--windows {args.windows} and --steps {args.steps}, with a window as warm-up,"
        parser.error(f"--ruler needs {RULER_TOKENS} tokens of each answer: {given} have fewer")


def free_memory() -> None:
    """Frees the memory of engines that nothing refers to any more."""
    gc.collect()
    torch.cuda.empty_cache()


def add_timing_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for how long steps are timed, and for the prompts before them."""
    parser.add_argument("--windows", type=int, default=3, help="timed windows (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=64, help="decode steps of a window (default: %(default)s)")
    text = "share of blocks that sparse prefills are given, of every prompt, or by its tokens (61440=0.17,124928=0.11)"
    parser.add_argument("--replay", type=densities_of, default={}, metavar="DENSITY", help=text)
    text = "prompts before the one whose first token is timed (default: %(default)s)"
    parser.add_argument("--warm-prompts", type=int, default=1, choices=(0, 1, 2), help=text)


def cell_path(out: Path, model: str, kv: str, context: int, batch: str = "auto") -> Path:
    """Returns the path of a cell's JSON file."""
    name = f"{Path(model).name}_{kv}_{context}_{batch}"
    return out / (re.sub(r"[^\w.-]", "_", name) + ".json")


def mix_path(out: Path, model: str, kv: str, mix: Mix) -> Path:
    """Returns the path of the JSON file of a batch with several lengths."""
    name = f"{Path(model).name}_{kv}_{mix_name(mix)}"
    return out / "mixes" / (re.sub(r"[^\w.,-]", "_", name) + ".json")


def config_of(args: argparse.Namespace, kv: str, batch: int, context: int) -> EngineConfig:
    """Returns the config of a cell's engine."""
    given = {
        name: getattr(args, name) for name in ("model", "load_format", "quantization", "hf_overrides", "enforce_eager")
    }
    sizes = {"max_num_seqs": batch, "max_cached_seqs": 0, "max_model_len": context + new_tokens(args, kv)}
    host = args.host_memory_gib or 0.85 * free_host_bytes() / GIB
    # Random weights were not trained for a context length, so any base of RoPE will do. Times do not depend on it.
    theta = 1e7 if args.load_format == "dummy" else None
    memory = {"gpu_memory_utilization": UTILIZATION, "host_memory_gib": host}
    return EngineConfig(kv=kv, rope_theta=theta, speculative_config=drafts_of(args, kv), **given, **sizes, **memory)


def drafts_of(args: argparse.Namespace, kv: str) -> dict[str, Any] | None:
    """Returns the speculative config of a policy's cells; None without drafts."""
    given: dict[str, Any] | None = args.speculative_config
    drafts = EngineConfig(model=args.model, kv=kv, speculative_config=given).speculation
    if drafts is None or args.acceptance is None:
        return given
    rates = [args.acceptance**place for place in range(1, drafted_tokens(args, kv) + 1)]
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    return {"method": drafts.method, **(given or {}), **synthetic}


def drafted_tokens(args: argparse.Namespace, kv: str) -> int:
    """Returns the maximum number of drafted tokens of a sequence in a step."""
    return EngineConfig(model=args.model, kv=kv, speculative_config=args.speculative_config).drafted_tokens


def new_tokens(args: argparse.Namespace, kv: str) -> int:
    """Returns the maximum number of tokens that a sequence generates, in warm-up, windows and profile."""
    steps = (args.windows + 1) * args.steps + PROFILED_STEPS
    return int(steps * (1 + drafted_tokens(args, kv)) + 64)


def measure(args: argparse.Namespace, loaded: LoadedModel, kv: str, context: int, batch: str) -> dict[str, Any]:
    """Measures a cell. If it does not fit into memory, the returned ``status`` says so."""
    cell: dict[str, Any] = dict.fromkeys(COLUMNS) | {"model": args.model, "kv": kv, "context": context, "status": "ok"}
    cell["about"] = provenance() | {"synthetic_prefill": args.synthetic_prefill, "quantization": args.quantization}
    try:
        count = fitting(args, loaded, kv, context) if batch == "auto" else int(batch)
        cell["batch"] = count
        if not count:
            raise MemoryError("not one sequence fits")
        engine = Engine(config_of(args, kv, count, context), loaded)
        cell["spec"] = engine.cache.spec.as_dict()
        cell["speculative_config"] = engine.config.speculative_config
        cell["notes"] = engine.notes
        cell["backends"] = engine.cache.ops.backends
        density = replayed_density(args.replay, context)
        cell["replayed_density"] = density if engine.cache.spec.prefill == "sparse" else None
        replay_blocks(engine, density)
        cell |= run(args, engine, loaded, count, context, new_tokens(args, kv))
    except (MemoryError, torch.OutOfMemoryError) as error:
        cell["status"] = f"out of memory: {str(error).splitlines()[0]}"
    return cell


def measure_mix(args: argparse.Namespace, loaded: LoadedModel, kv: str, mix: Mix) -> dict[str, Any]:
    """Measures steps of a batch with several lengths, and of its parts alone."""
    rows, longest = sum(part.rows for part in mix), max(part.tokens for part in mix)
    engine = Engine(config_of(args, kv, rows, longest), loaded)
    cell = {"model": args.model, "kv": kv, "mix": mix_name(mix), "about": provenance()}
    cell |= {"spec": engine.cache.spec.as_dict(), "backends": engine.cache.ops.backends}
    return cell | time_mix(engine, mix, new_tokens(args, kv), args.steps, args.windows)


def fitting(args: argparse.Namespace, loaded: LoadedModel, kv: str, context: int) -> int:
    """Returns how many sequences fit on both the device and the host, as engine and planner count."""
    shape, dtype = loaded.config.shape, loaded.model.dtype
    capacity = context + new_tokens(args, kv)
    config = config_of(args, kv, 1, context)
    layout = Layout(config.spec(), shape, dtype, capacity)
    free, total = torch.cuda.mem_get_info()
    assert config.host_memory_gib is not None
    usable, host = int(total * UTILIZATION) - (total - free), int(config.host_memory_gib * GIB)
    return largest_batch(loaded.config, layout, context, capacity, usable, host, drafts=config.speculation).both


def run(
    args: argparse.Namespace, engine: Engine, loaded: LoadedModel, count: int, context: int, new: int
) -> dict[str, Any]:
    """Fills an engine with sequences that can generate ``new`` tokens, times its steps, and returns the figures."""
    cache = engine.cache
    samples = [] if args.ruler is None else ruler_samples(loaded, context, count, args.ruler)
    prompts = [tokens_of(loaded, sample) for sample in samples] or random_prompts(engine, count, context)
    scatter(cache)
    if args.hit_rate is not None and cache.fetches is not None:  # before the first step is captured
        cache.selection_hook = ScriptedSelection(cache, context - RAGGED, args.hit_rate)
    torch.cuda.synchronize()
    ttft = fill(engine, prompts, new, args.synthetic_prefill, args.warm_prompts)
    for _ in range(args.steps):
        engine.step()
    torch.cuda.synchronize()
    before, drafted_before = engine.stats().fetches, drafted(engine)
    windows = [window(engine, args.steps, count) for _ in range(args.windows)]
    step = statistics.median(one.seconds for one in windows)
    stats = engine.stats()
    drafts, accepted = (now - then for now, then in zip(drafted(engine), drafted_before, strict=True))
    used = {name: tier.used_bytes for name, tier in stats.tiers.items()}
    buffer = cache.layout.bytes_per_block()["segment_slots"]
    selected, fetched, moved = (
        getattr(stats.fetches, name) - getattr(before, name) for name in ("selected", "fetched", "fetched_bytes")
    )
    return {
        "decode_tokens_per_s": statistics.median(one.tokens / one.seconds for one in windows),
        "step_ms": 1e3 * step,
        "windows_ms": [1e3 * one.seconds for one in windows],
        "tokens_per_step": statistics.median(one.tokens / count for one in windows),
        "drafts_per_step": drafts / (args.windows * args.steps * count),
        "accepted_per_round": accepted / drafts if drafts else None,
        "ttft_s": ttft,
        "device_gib": (torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]) / GIB,
        "device_gib_per_sequence": ((used["device"] + used["states"]) / count + buffer) / GIB,
        "host_gib": used["host"] / GIB,
        "h2d_mb_per_step": moved / (args.windows * args.steps) / 1e6,
        "hit_rate": 1 - fetched / selected if selected else None,
        "ruler": 100 * statistics.mean(scores(engine, loaded, samples)) if samples else None,
        "profile": profile(engine),
    }


def drafted(engine: Engine) -> tuple[int, int]:
    """Returns the number of drafts so far, each of one sequence in one step, and of their accepted tokens."""
    stats = engine.stats().speculation
    return (0, 0) if stats is None else (stats.num_drafts, stats.num_accepted_tokens)


def ruler_samples(loaded: LoadedModel, length: int, count: int, seed: int) -> list[Sample]:
    """Returns ``count`` samples of at most ``length`` tokens, all tasks in turn."""
    each = -(-count // len(ruler.TASKS))
    by_task = [ruler.samples(task, loaded.tokenizer, length, each, seed) for task in ruler.TASKS]
    return [sample for of_all_tasks in zip(*by_task, strict=True) for sample in of_all_tasks][:count]


def tokens_of(loaded: LoadedModel, sample: Sample) -> list[int]:
    """Returns the tokens of a sample's prompt."""
    return loaded.tokenizer.encode(sample.turns[0], add_special_tokens=True)


def scores(engine: Engine, loaded: LoadedModel, samples: list[Sample]) -> list[float]:
    """Returns the score of each sample, from 0 to 1. The engine runs a request for each, whose id is its number. What a
    request has generated after the end of its answer, or beyond the sample's limit, does not count."""
    ends = loaded.tokenizer.eos_token_ids | set(loaded.config.eos_token_ids)
    generated = {one.request.request_id: one.request.output_token_ids for one in engine.scheduler.running}
    found = []
    for number, sample in enumerate(samples):
        answer = list(islice(generated[str(number)], sample.max_new_tokens))
        end = next((place for place, token in enumerate(answer) if token in ends), len(answer))
        found.append(score(sample, [loaded.tokenizer.decode(answer[:end])]))
    return found


def random_prompts(engine: Engine, count: int, context: int) -> list[list[int]]:
    """Returns ``count`` prompts of random tokens, up to ``RAGGED`` tokens shorter than ``context``."""
    draw, words = random.Random(0), range(min(1000, engine.model_config.vocab_size))
    return [draw.choices(words, k=context - draw.randrange(RAGGED)) for _ in range(count)]


def fill(engine: Engine, prompts: list[list[int]], new: int, synthetic: bool, warm: int = 1) -> float:
    """Begins a sequence for each prompt, which can generate ``new`` tokens. Before them, ``warm`` prompts as long as
    the first are computed as warm-up. Returns the first sequence's time to first token in seconds. Raises MemoryError
    if some sequences do not fit."""
    for _ in range(warm):
        first_token(engine, "before", [*reversed(prompts[0])], new)
        engine.abort("before")  # an aborted request, unlike a finished one, is not kept in the prefix cache
    seconds = first_token(engine, "0", prompts[0], new)
    begin(engine, prompts[1:], new, synthetic)
    return seconds


def first_token(engine: Engine, name: str, prompt: list[int], new: int) -> float:
    """Adds a request, and makes steps until its first token. Returns the seconds from the request's arrival to this
    token. Raises MemoryError if the request does not fit."""
    engine.add_request(name, prompt, endless(new))
    while not (outputs := engine.step()):
        if engine.stats().waiting:  # no other request runs, so no memory will ever become free
            raise MemoryError("not one sequence fits")
    if outputs[0].error is not None:
        raise MemoryError(outputs[0].error)
    times = outputs[0].times
    assert times.first_token is not None
    return times.first_token - times.arrival


def time_mix(engine: Engine, mix: Mix, new: int, steps: int, windows: int) -> dict[str, Any]:
    """Returns the milliseconds of a step for the floor, for each part alone, and for all parts together. Also returns
    the time that is expected from the parts alone, and the ratio of the measured time to it. ``new`` is the maximum
    number of tokens that a sequence generates."""
    scatter(engine.cache)
    batches = {"floor": (Part(1, FLOOR_TOKENS),), **{str(part): (part,) for part in mix}, "together": mix}
    times, profiles = {}, {}
    for name, parts in batches.items():
        lengths = [part.tokens for part in parts for _ in range(part.rows)]
        step, profiles[name] = time_rows(engine, lengths, new, steps, windows)
        times[name] = 1e3 * step
    alone = sum(times[str(part)] for part in mix) - (len(mix) - 1) * times["floor"]
    return {"step_ms": times, "expected_ms": alone, "ratio": times["together"] / alone, "profiles": profiles}


def time_rows(engine: Engine, lengths: list[int], new: int, steps: int, windows: int) -> tuple[float, dict[str, Any]]:
    """Times decode steps of a batch whose rows have the given lengths. Returns the seconds of a step, and a profile.
    The rows leave the engine afterwards."""
    draw, words = random.Random(0), range(min(1000, engine.model_config.vocab_size))
    prompts = [draw.choices(words, k=length - draw.randrange(RAGGED)) for length in lengths]
    begin(engine, prompts, new, synthetic=True)
    window(engine, steps, len(lengths))
    step = statistics.median(window(engine, steps, len(lengths)).seconds for _ in range(windows))
    profiled = profile(engine)
    for row in range(len(lengths)):
        engine.abort(str(row))
    engine.step()
    return step, profiled


def summarise(out: Path) -> None:
    """Writes summary.csv and the plots from all cells in the folder."""
    cells = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    with (out / "summary.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows([show(cell.get(name)) for name in COLUMNS] for cell in cells)
    plot_throughput(cells, out)


if __name__ == "__main__":
    sys.exit(main())
