"""The stages of ``formats_table.py``: each appends the rows that its file is missing.

Policies of a stage share what they can: the model, and the prefill of the same prompts.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.sweeps import throughput
from benchmarks.sweeps.format_distortion import distortions
from benchmarks.sweeps.rows import BYTES, DISTORTION, FIDELITY, RULER, THROUGHPUT, Kind, Rows
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.startup.loading import device_of, load_from_config
from shadowkv.eval.__main__ import main as evaluate
from shadowkv.eval.fidelity.measured import of_policy, read_measured
from shadowkv.eval.fidelity.report import FIGURES, over_prompts
from shadowkv.eval.fidelity.texts import read_prompts
from shadowkv.eval.files import Prediction, PredictionFile
from shadowkv.eval.policies import local_policies
from shadowkv.eval.provenance import provenance
from shadowkv.eval.ruler import TASKS
from shadowkv.eval.statistics import mean_and_error
from shadowkv.kvcache.layout import Layout
from shadowkv.kvcache.parts import resolve
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.spec import KVSpec
from shadowkv.models.config import ModelConfig
from shadowkv.models.loader import load_config
from shadowkv.plan.memory import sequence_bytes

Cell = dict[str, Any]
CONTEXTS = (61440, 124928)
"""Tokens of a sequence where bytes and speed are measured."""

LENGTHS = (16384, 32768)
"""Tokens of RULER's prompts and answers."""


def measure_bytes(args: argparse.Namespace, rows: Rows) -> None:
    """Bytes per token of a sequence of 60K, scales, states and buffers included, as the planner counts."""
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
        rows.add(cell | figures | _about(layout.spec, "none"))


def measure_distortion(args: argparse.Namespace, rows: Rows) -> None:
    """D of keys and values on natural text."""
    name, config = _quality_model(args)
    cell: Cell = {"model": name, "prompts": args.prompts, "prompt_tokens": args.prompt_tokens}
    missing = [kv for kv in args.kv if not rows.has(cell | {"kv": kv})]
    if not missing:
        return
    loaded = load_from_config(
        EngineConfig(
            args.model,
            adapter=args.adapter,
            load_format=args.load_format,
            device=args.device,
            rope_theta=args.rope_theta,
            hf_overrides=args.hf_overrides,
            max_model_len=args.prompt_tokens + 1,
        )
    )
    prompts = read_prompts(args.text, loaded.tokenizer, args.prompts, args.prompt_tokens)
    specs = [resolve(preset(kv), config.shape) for kv in missing]
    found = distortions(loaded, specs, [prompt.tokens for prompt in prompts])
    for kv, spec, (keys, values) in zip(missing, specs, found, strict=True):
        rows.add(cell | {"kv": kv, "d_keys": keys, "d_values": values} | _about(spec, _device(args.device)))


def measure_fidelity(args: argparse.Namespace, rows: Rows) -> None:
    """KL and top-1 against ``full`` along its own continuations, by ``shadowkv.eval``, whose files are kept."""
    name, config = _quality_model(args)
    cell: Cell = {
        "model": name,
        "prompts": args.prompts,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
    }
    missing = [kv for kv in args.kv if not rows.has(cell | {"kv": kv})]
    if not missing:
        return
    folder = args.out / "fidelity"
    counts = [f"--{one.replace('_', '-')}={cell[one]}" for one in ("prompts", "prompt_tokens", "new_tokens")]
    # Attention is not needed here: it is compared once, at the first step.
    texts = ["--text", *map(str, args.text)] if args.text else []
    _evaluate("fidelity", args, missing, folder, [*counts, f"--measure-every={args.new_tokens}", *texts])
    measured = read_measured(folder / "fidelity.json")
    for kv in missing:
        ones = of_policy(measured, _label(kv, config))
        figures = {"kl": over_prompts(ones, FIGURES["mean_kl"]), "top1": over_prompts(ones, FIGURES["top1_agreement"])}
        for figure, found in figures.items():
            assert found is not None, "every policy has these"
            cell[figure], cell[f"{figure}_stderr"] = found[0], found[1] if len(ones) > 1 else None
        rows.add(cell | {"kv": kv} | _about(resolve(preset(kv), config.shape), _device(args.device)))


def measure_ruler(args: argparse.Namespace, rows: Rows) -> None:
    """Scores in per cent and how much they are below ``full``'s on the same samples, by ``shadowkv.eval``."""
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
        # Policies that get more samples get these first, from the same prefill.
        together = [kv for (other, most), some in missing.items() if other == length and most >= count for kv in some]
        flags = ["--length", str(length), "--samples", str(count)]
        if args.tasks:
            flags += ["--tasks", *args.tasks]
        _evaluate("ruler", args, list(dict.fromkeys(["full", *together])), folder, flags)
        answers = PredictionFile(folder / "predictions.jsonl").predictions
        for kv, cell in cells.items():
            figures = paired_score(answers, _label(kv, config), length, tasks)
            rows.add(cell | figures | _about(resolve(preset(kv), config.shape), _device(args.device)))


def paired_score(answers: Sequence[Prediction], label: str, length: int, tasks: Sequence[str]) -> Cell:
    """A policy's mean score at a length and its difference to ``full`` on the samples that both have, in per cent,
    with standard errors."""
    own, full = (
        {one.sample: one.score for one in answers if (one.policy, one.length) == (policy, length) and one.task in tasks}
        for policy in (label, "full")
    )
    found: Cell = {}
    paired = [score - full[sample] for sample, score in own.items() if sample in full]
    for name, error, values in (
        ("score", "stderr", list(own.values())),
        ("difference", "difference_stderr", paired),
    ):
        mean, spread = mean_and_error(values)
        found |= {name: 100 * mean, error: 100 * spread if len(values) > 1 else None}
    return found


def measure_throughput(args: argparse.Namespace, rows: Rows) -> None:
    """Decode at the largest batch, by ``throughput_sweep.py``, whose files are kept; at 122K for ``--long-kv`` only.

    Raises RuntimeError without a GPU, and at the end for policies that failed.
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
            except RuntimeError as error:  # for the first that has no file; the others may still work
                number = next(number for number, kv in enumerate(left) if not files[kv].exists())
                failed.append(f"{left[number]} at {context}: {str(error).splitlines()[0]}")
                left = left[number + 1 :]
        for kv in missing:
            if files[kv].exists():
                found = json.loads(files[kv].read_text(encoding="utf-8"))
                figures = {name: found[name] for name in ("batch", "step_ms", "status")}
                figures["tokens_per_s"] = found["decode_tokens_per_s"]
                rows.add(cells[kv] | figures | _about(resolve(preset(kv), config.shape), _device("cuda")))
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
"""The stages, ordered by their cost; each has ``<name>.csv``."""


def open_rows(out: Path, stage: str) -> Rows:
    """The file of a stage."""
    return Rows(out / f"{stage}.csv", STAGES[stage][0], ())


def _evaluate(suite: str, args: argparse.Namespace, policies: Sequence[str], folder: Path, flags: list[str]) -> None:
    """Runs a suite of ``shadowkv.eval``; raises RuntimeError if it fails, after printing why."""
    model = [f"--model={args.model}", f"--load-format={args.load_format}", f"--device={args.device}"]
    overrides = json.dumps(args.hf_overrides) if args.hf_overrides else None
    chosen = (("adapter", args.adapter), ("rope-theta", args.rope_theta), ("hf-overrides", overrides))
    model += [f"--{name}={value}" for name, value in chosen if value]
    if evaluate([suite, *model, *flags, "--out", str(folder), "--kv", *policies]):
        raise RuntimeError(f"{suite} did not come to its end")


def _quality_model(args: argparse.Namespace) -> tuple[str, ModelConfig]:
    """Name, including the adapter's, and config of the model whose answers are judged."""
    name = Path(args.model).name
    return f"{name}+{Path(args.adapter).name}" if args.adapter else name, load_config(
        args.model, hf_overrides=args.hf_overrides
    )


def _label(kv: str, config: ModelConfig) -> str:
    """The policy's label in files of ``shadowkv.eval``."""
    return local_policies([kv], (), config.shape)[0].label


def _device(name: str) -> str:
    """What a row says about where it was measured."""
    return torch.cuda.get_device_name() if device_of(name).type == "cuda" else "cpu"


def _about(spec: KVSpec, device: str) -> Cell:
    """Last columns of a row."""
    found, spec_json = provenance(), json.dumps(asdict(spec), separators=(",", ":"))
    return {"commit": found["commit"], "command": found["command"], "device": device, "spec": spec_json}
