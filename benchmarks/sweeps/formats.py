"""Makes one table of all formats and policies: bytes, distortion, fidelity, RULER and decode throughput.

Stages are measured one after the other. Each writes ``<stage>.csv`` in ``--out``. Existing rows are not measured again,
so a stopped run can be continued, and parts can run on other machines (``--stages``, ``--kv``). The stage ``table``
joins all existing rows: it writes ``summary.csv``, the table in ``--docs``, and plots. Cells that were not measured
stay empty.

    python -m benchmarks.sweeps.formats --adapter DIR --rope-theta 4e6 --out benchmarks/results/h200/formats
    python -m benchmarks.sweeps.formats --adapter DIR --rope-theta 4e6 --out benchmarks/results/h200/formats \\
        --stages bytes distortion fidelity table --device cpu
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.sweeps import throughput
from benchmarks.sweeps.engines import Cell, about_spec, add_model_arguments, model_of
from benchmarks.sweeps.formats_summary import summarise
from benchmarks.sweeps.rows import BYTES, DISTORTION, FIDELITY, RULER, THROUGHPUT, Kind, Rows
from shadowkv import baselines
from shadowkv.engine.config import EngineConfig, add_policies, policy_name
from shadowkv.engine.startup.loading import device_of, load_from_config
from shadowkv.eval.__main__ import main as evaluate
from shadowkv.eval.fidelity.measured import of_policy, read_measured
from shadowkv.eval.fidelity.prompts import read_prompts
from shadowkv.eval.fidelity.report import FIGURES, over_prompts
from shadowkv.eval.records.policies import local_policies
from shadowkv.eval.records.predictions import Prediction, PredictionFile
from shadowkv.eval.reports.statistics import mean_and_error
from shadowkv.eval.running.caches import open_cache, prefill_all
from shadowkv.eval.suites.ruler import TASKS
from shadowkv.kvcache.inspection import compressed_rows, decode_part, exact_elsewhere, exact_keys, exact_values
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.parts import resolve
from shadowkv.kvcache.policy.spec import PAGE, KVSpec
from shadowkv.kvcache.presets import PRESETS, preset
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.loader import LoadedModel, load_config
from shadowkv.plan.planner import sequence_bytes

TABLE = "table"
SAMPLES = 25
LONG_KV = ["full", "shadowkv", "turbo", "turbo-host", "turboquant-4"]
CONTEXTS = (61440, 124928)
"""Tokens of a sequence for the measurements of bytes and speed."""

LENGTHS = (16384, 32768)
"""Lengths of RULER's samples: tokens of prompt and answer together."""


# -- stages: each measures the rows that its file does not have yet ----------------------------------------------------


def measure_bytes(args: argparse.Namespace, rows: Rows) -> None:
    """Computes the bytes per token of a sequence of 61,440 tokens, as the planner does. Scales, states and fetch
    buffers are included."""
    config, context = load_config(args.speed_model), CONTEXTS[0]
    for kv in args.kv:
        cell: Cell = {"model": args.speed_model, "kv": kv, "context": context}
        if rows.has(cell):
            continue
        layout = Layout(preset(kv), config.shape, torch.bfloat16, context)
        size = sequence_bytes(layout, context)
        figures = {
            "device_bytes_per_token": round(size.device / context),
            "host_bytes_per_token": round(size.host / context),
            "bytes_per_token": round((size.device + size.host) / context),
        }
        rows.add(cell | figures | about_spec(layout.spec, "none"))


def measure_distortion(args: argparse.Namespace, rows: Rows) -> None:
    """Measures the distortion D of keys and of values (``distortions``) on natural text."""
    name, config = _quality_model(args)
    cell: Cell = {"model": name, "prompts": args.prompts, "prompt_tokens": args.prompt_tokens}
    missing = [kv for kv in args.kv if not rows.has(cell | {"kv": kv})]
    if not missing:
        return
    loaded = load_from_config(EngineConfig(**model_of(args), max_model_len=args.prompt_tokens + 1))
    prompts = read_prompts(args.text, loaded.tokenizer, args.prompts, args.prompt_tokens)
    specs = [resolve(preset(kv), config.shape) for kv in missing]
    errors = distortions(loaded, specs, [prompt.tokens for prompt in prompts])
    for kv, spec, (keys, values) in zip(missing, specs, errors, strict=True):
        rows.add(cell | {"kv": kv, "d_keys": keys, "d_values": values} | about_spec(spec, _device(args.device)))


def measure_fidelity(args: argparse.Namespace, rows: Rows) -> None:
    """Measures KL and top-1 agreement to ``full`` along the continuations that ``full`` generates. It runs
    ``shadowkv.eval``, and keeps the files that this writes."""
    model, config = _quality_model(args)
    sizes = {name: getattr(args, name) for name in ("prompts", "prompt_tokens", "new_tokens")}
    cell: Cell = {"model": model, **sizes}
    missing = [kv for kv in args.kv if not rows.has(cell | {"kv": kv})]
    if not missing:
        return
    folder = args.out / "fidelity"
    counts = [f"--{name.replace('_', '-')}={size}" for name, size in sizes.items()]
    # Comparisons of attention are not needed here, so attention is compared only at the first step.
    texts = ["--text", *map(str, args.text)] if args.text else []
    _evaluate("fidelity", args, missing, folder, [*counts, f"--measure-every={args.new_tokens}", *texts])
    measured = read_measured(folder / "fidelity.json")
    for kv in missing:
        prompts = of_policy(measured, _label(kv, config))
        for figure, name in (("kl", "mean_kl"), ("top1", "top1_agreement")):
            mean = over_prompts(prompts, FIGURES[name])
            assert mean is not None, "every policy has these"
            cell[figure], cell[f"{figure}_stderr"] = mean[0], mean[1] if len(prompts) > 1 else None
        rows.add(cell | {"kv": kv} | about_spec(resolve(preset(kv), config.shape), _device(args.device)))


def measure_ruler(args: argparse.Namespace, rows: Rows) -> None:
    """Measures scores in per cent, and their differences to the scores of ``full`` on the same samples. It runs
    ``shadowkv.eval``."""
    name, config = _quality_model(args)
    tasks, folder = tuple(args.tasks or TASKS), args.out / "ruler"
    shown = ",".join(args.tasks) if args.tasks else "all"
    missing: dict[tuple[int, int], dict[str, Cell]] = defaultdict(dict)
    for kv in args.kv:
        count = args.samples.get(kv, args.samples[None])
        for length in args.lengths:
            cell: Cell = {"model": name, "kv": kv, "length": length, "samples": count, "tasks": shown}
            if not rows.has(cell):
                missing[length, count][kv] = cell
    for (length, count), cells in sorted(missing.items()):
        # Policies with more samples answer the first ``count`` of them here, so that they share the prefills.
        enough = [kvs for (tokens, samples), kvs in missing.items() if tokens == length and samples >= count]
        together = [kv for kvs in enough for kv in kvs]
        flags = ["--length", str(length), "--samples", str(count)]
        if args.tasks:
            flags += ["--tasks", *args.tasks]
        _evaluate("ruler", args, list(dict.fromkeys(["full", *together])), folder, flags)
        answers = PredictionFile(folder / "predictions.jsonl").predictions
        for kv, cell in cells.items():
            figures = paired_score(answers, _label(kv, config), length, tasks)
            rows.add(cell | figures | about_spec(resolve(preset(kv), config.shape), _device(args.device)))


def paired_score(answers: Sequence[Prediction], label: str, length: int, tasks: Sequence[str]) -> Cell:
    """Returns a policy's mean score at a length, and the mean difference to ``full`` on the samples that both have
    answered. Both are in per cent and have a standard error."""
    own, full = (
        {x.sample: x.score for x in answers if (x.policy, x.length) == (policy, length) and x.task in tasks}
        for policy in (label, "full")
    )
    figures: Cell = {}
    paired = [score - full[sample] for sample, score in own.items() if sample in full]
    for name, error, values in (("score", "stderr", list(own.values())), ("difference", "difference_stderr", paired)):
        mean, spread = mean_and_error(values)
        figures |= {name: 100 * mean, error: 100 * spread if len(values) > 1 else None}
    return figures


def measure_throughput(args: argparse.Namespace, rows: Rows) -> None:
    """Measures decode speed at the largest batch. It runs ``throughput.py``, and keeps the files that this writes. Only
    the policies of ``--long-kv`` are measured at 124,928 tokens.

    Raises RuntimeError if there is no GPU. If a policy fails, the others are measured first, and RuntimeError is raised
    at the end.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("throughput is measured on a GPU, and there is none")
    config, folder = load_config(args.speed_model), args.out / "throughput"
    flags = ["--synthetic-prefill", "--load-format", "dummy", "--model", args.speed_model, "--out", str(folder)]
    for name in ("hit_rate", "windows", "steps", "host_memory_gib"):
        if getattr(args, name) is not None:
            flags += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    failed: list[str] = []
    for context in args.contexts:
        asked = args.kv if context == CONTEXTS[0] else [kv for kv in args.kv if kv in args.long_kv]
        cells: dict[str, Cell] = {kv: {"model": args.speed_model, "kv": kv, "context": context} for kv in asked}
        files = {kv: throughput.cell_path(folder, args.speed_model, kv, context) for kv in asked}
        left = missing = [kv for kv in asked if not rows.has(cells[kv])]
        while left:
            try:
                throughput.main([*flags, "--context", str(context), "--kv", *left])
                left = []
            except RuntimeError as error:  # the first policy without a file failed; later ones may still work
                number = next(number for number, kv in enumerate(left) if not files[kv].exists())
                failed.append(f"{left[number]} at {context}: {str(error).splitlines()[0]}")
                left = left[number + 1 :]
        for kv in missing:
            if files[kv].exists():
                cell = json.loads(files[kv].read_text(encoding="utf-8"))
                figures = {name: cell[name] for name in ("batch", "step_ms", "status")}
                figures["tokens_per_s"] = cell["decode_tokens_per_s"]
                rows.add(cells[kv] | figures | about_spec(resolve(preset(kv), config.shape), _device("cuda")))
    if failed:
        raise RuntimeError(f"not measured: {'; '.join(failed)}")


Stage = Callable[[argparse.Namespace, Rows], None]
STAGES: dict[str, tuple[Kind, Stage]] = {
    "bytes": (BYTES, measure_bytes),
    "distortion": (DISTORTION, measure_distortion),
    "fidelity": (FIDELITY, measure_fidelity),
    "ruler": (RULER, measure_ruler),
    "throughput": (THROUGHPUT, measure_throughput),
}
"""The stages, in order of their cost. Each writes ``<name>.csv``."""


def open_rows(out: Path, stage: str) -> Rows:
    """Opens the file of a stage."""
    return Rows(out / f"{stage}.csv", STAGES[stage][0], ())


def _evaluate(suite: str, args: argparse.Namespace, policies: Sequence[str], folder: Path, flags: list[str]) -> None:
    """Runs a suite of ``shadowkv.eval``. If the suite fails, it prints the reason, and RuntimeError is raised."""
    model = [f"--model={args.model}", f"--load-format={args.load_format}", f"--device={args.device}"]
    overrides = json.dumps(args.hf_overrides) if args.hf_overrides else None
    chosen = (("adapter", args.adapter), ("rope-theta", args.rope_theta), ("hf-overrides", overrides))
    model += [f"--{name}={value}" for name, value in chosen if value]
    if evaluate([suite, *model, *flags, "--out", str(folder), "--kv", *policies]):
        raise RuntimeError(f"{suite} did not come to its end")


def _quality_model(args: argparse.Namespace) -> tuple[str, ModelConfig]:
    """Returns name and config of the model whose answers are measured. The name includes the adapter's."""
    name = Path(args.model).name
    return f"{name}+{Path(args.adapter).name}" if args.adapter else name, load_config(
        args.model, hf_overrides=args.hf_overrides
    )


def _label(kv: str, config: ModelConfig) -> str:
    """The policy's label in files of ``shadowkv.eval``."""
    return local_policies([kv], (), config.shape)[0].label


def _device(name: str) -> str:
    """Returns the device's name for a row."""
    return torch.cuda.get_device_name() if device_of(name).type == "cuda" else "cpu"


def distortions(
    loaded: LoadedModel, specs: Sequence[KVSpec], prompts: Sequence[Sequence[int]]
) -> list[tuple[float, float]]:
    """Returns, for each policy, the distortions D of keys and of values: the mean of ||x - x'||^2 / ||x||^2 over all
    compressed rows x.

    A row is the key after RoPE, or the value, of one token in one kv head of one layer, as a dense prefill computes it.
    x' is the row that decode steps attend to instead. Sink, outliers and the exact tail are not compressed. D is 0 if
    the policy compresses nothing.

    Args:
        prompts: token ids, computed once for all policies.
    """
    totals = torch.zeros(len(specs), 2, dtype=torch.float64)
    counts = [0] * len(specs)
    for prompt in prompts:
        capacity = len(prompt) + 1  # room for one decode step, whose batch says where rows are stored
        caches = [open_cache(loaded, spec, capacity) for spec in (KVSpec(), *specs)]
        (full, *others), _ = prefill_all(loaded.model, caches, list(prompt), capacity)
        for number, (cache, sequence) in enumerate(zip(caches[1:], others, strict=True)):
            for errors in _errors(caches[0], full, cache, sequence):
                totals[number] += errors.sum(1).cpu()
                counts[number] += errors.shape[1]
    return [
        (float(keys) / max(1, count), float(values) / max(1, count))
        for (keys, values), count in zip(totals, counts, strict=True)
    ]


def _errors(full: KVCache, exact: CachedSequence, cache: KVCache, sequence: CachedSequence) -> Iterator[Tensor]:
    """Yields, for each layer, the relative squared errors of its n compressed rows, float64 [2, n]: of keys and of
    values."""
    dense, coded = decode_part(full, [exact]), decode_part(cache, [sequence])
    batch = coded.compressed
    if batch is None:
        return
    tokens = batch.pages.shape[1] * PAGE
    for layer in range(cache.shape.num_layers):
        exact_rows = exact_keys(full, layer, dense.pages[0]), exact_values(full, layer, dense.pages[0])
        stored = ~exact_elsewhere(cache, layer, batch)[0].repeat_interleave(cache.spec.chunk, dim=1)[:, :tokens]
        errors = []
        for row, decoded in zip(exact_rows, compressed_rows(cache, layer, batch), strict=True):
            exact_row = row[:, :tokens].double()
            norm = exact_row.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)  # a row of zeros has no error
            errors.append(((exact_row - decoded.double()).square().sum(-1) / norm)[stored])
        yield torch.stack(errors)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    args = parser().parse_args(arguments)
    args.samples = {None: SAMPLES, **dict(args.samples)}
    args.out.mkdir(parents=True, exist_ok=True)
    well = True
    for name, (_, measure) in STAGES.items():
        if name not in args.stages:
            continue
        try:
            measure(args, open_rows(args.out, name))
        except (RuntimeError, MemoryError) as error:  # other stages do not depend on this one
            print(f"error: {name}: {error}", file=sys.stderr, flush=True)
            well = False
    if TABLE in args.stages:
        summarise(args.out, args.docs)
    return 0 if well else 1


def samples(text: str) -> tuple[str | None, int]:
    """Parses ``[POLICY=]N``. Returns a policy (None for all other policies) and its number of samples. Raises
    ArgumentTypeError for any other text."""
    kv, named, count = text.rpartition("=")
    if not count.isdecimal() or not int(count):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of samples, as 25, or of a policy, as turbo=50")
    return (policy_name(kv) if named else None), int(count)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    baselines.register()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    stages = (*STAGES, TABLE)
    add("--stages", nargs="+", choices=stages, default=stages, help="(default: all)")
    add_policies(parser, *PRESETS)
    add("--out", type=Path, required=True, help="folder of the results")
    add("--docs", type=Path, default=Path("docs/formats.md"), help="file that has the table (default: %(default)s)")
    quality = parser.add_argument_group("distortion, fidelity and RULER")
    add = quality.add_argument
    add_model_arguments(quality)
    add("--text", type=Path, nargs="+", metavar="FILE", help="natural text (default: RULER's essays)")
    add("--prompts", type=int, default=4, help="cut from the text (default: %(default)s)")
    add("--prompt-tokens", type=int, default=2048, help="(default: %(default)s)")
    add("--new-tokens", type=int, default=16, help="that full generates after each (default: %(default)s)")
    add("--lengths", type=int, nargs="+", choices=LENGTHS, default=LENGTHS, help="of RULER (default: both)")
    add("--tasks", nargs="+", metavar="TASK", help="of RULER (default: all)")
    text = f"of each of RULER's tasks and lengths (default: {SAMPLES} turbo={2 * SAMPLES})"
    default = [(None, SAMPLES), ("turbo", 2 * SAMPLES)]
    add("--samples", nargs="+", type=samples, default=default, metavar="[POLICY=]N", help=text)
    speed = parser.add_argument_group("bytes and throughput")
    add = speed.add_argument
    add("--speed-model", default="llama-3.1-8b", help="its weights are random (default: %(default)s)")
    add("--contexts", type=int, nargs="+", choices=CONTEXTS, default=CONTEXTS, help="of throughput (default: both)")
    text = f"policies at {CONTEXTS[1]} tokens (default: {' '.join(LONG_KV)})"
    add("--long-kv", nargs="+", type=policy_name, default=LONG_KV, help=text)
    text = "as for the throughput sweep"
    add("--hit-rate", type=float, default=0.72, metavar="SHARE", help=f"{text} (default: %(default)s)")
    add("--windows", type=int, help=text)
    add("--steps", type=int, help=text)
    add("--host-memory-gib", type=float, help=text)
    return parser


if __name__ == "__main__":
    sys.exit(main())
