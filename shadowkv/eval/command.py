"""Runs ``shadowkv eval`` after its flags have been parsed: loads a model or queries a server, answers the samples that
have no answer yet, and writes summaries of all answers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from tqdm import tqdm

from shadowkv.command_line import one_line
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.startup.loading import load_from_config
from shadowkv.eval.fidelity import command as fidelity
from shadowkv.eval.fidelity.follow import with_exact_tails
from shadowkv.eval.fidelity.prompts import sha256_by_kind
from shadowkv.eval.prompts.texts import source_versions
from shadowkv.eval.provenance import command_line, write_config
from shadowkv.eval.records.policies import Policy, local_policies, served_policy
from shadowkv.eval.records.predictions import Prediction, PredictionFile, Sample
from shadowkv.eval.reports.ablation import write_score_ablation
from shadowkv.eval.reports.outputs import write_outputs
from shadowkv.eval.running.local import Forks
from shadowkv.eval.running.remote import Remote, load_tokenizer
from shadowkv.eval.suites.registry import SUITES
from shadowkv.load_settings import DEQUANTIZED
from shadowkv.models.loader import LoadedModel
from shadowkv.models.tokenization.tokenizer import Tokenizer

SAME = ("suite", "adapter", "rope_theta", "hf_overrides", "dtype", "quantization", "load_format")
"""Flags of all suites whose values must be the same in all runs that add results to one ``--out``."""


def execute(args: argparse.Namespace, arguments: Sequence[str] | None) -> int:
    """Runs a suite, and records ``arguments`` as the command line. Returns the exit status."""
    try:
        (_compare if args.suite == "fidelity" else _evaluate)(args, command_line(arguments))
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        longest = "--prompt-tokens + --new-tokens" if args.suite == "fidelity" else "--length"
        print(f"error: {one_line(error, max_model_len=longest)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; the same command continues from {args.out}", file=sys.stderr)
        return 130
    return 0


def _evaluate(args: argparse.Namespace, command: list[str]) -> None:
    answerer, tokenizer, policies, model = _remote(args) if args.base_url else _local(args)
    samples = SUITES[args.suite](args, tokenizer)
    same = (*SAME, "seed", "data", "chat", "needles", "turns")
    settings = _settings(args, model, same)
    if args.suite == "niah":
        settings["haystack"] = args.haystack.name
    if args.suite == "open-ended":
        settings["source_versions"] = source_versions()
    write_config(args.out, settings, policies, command)
    predictions = run(answerer, samples, policies, args.out, model)
    if args.vary:
        write_score_ablation(args.vary.field, predictions, model, args.out)
    print((args.out / "summary.md").read_text(encoding="utf-8"))


def _compare(args: argparse.Namespace, command: list[str]) -> None:
    loaded, policies, model = _load(args, args.prompt_tokens + args.new_tokens)
    if args.unquantized_reference and not loaded.model.forms and loaded.config.quantization is None:
        raise ValueError("--unquantized-reference has no meaning here: no weight is quantized")
    if args.exact_tails:
        policies = with_exact_tails(policies, args.new_tokens)
    prompts = fidelity.cut(args, loaded)
    same = ("text", "prompts", "prompt_tokens", "new_tokens", "measure_every", "unquantized_reference")
    settings = _settings(args, model, (*SAME, *same))
    if Path("code") in (args.text or ()):
        settings["source_versions"] = source_versions()
    settings["prompts_sha256"] = sha256_by_kind(prompts)
    write_config(args.out, settings, policies, command)
    need = args.prompt_tokens + args.new_tokens
    leading = load_from_config(_config(args, need, DEQUANTIZED)) if args.unquantized_reference else None
    measured = fidelity.measure(args, loaded, policies, prompts, model, leading)
    if args.vary:
        fidelity.write_divergence_ablation(args.vary.field, measured, model, args.prompt_tokens, args.out)
    print((args.out / "summary.md").read_text(encoding="utf-8"))


def _settings(args: argparse.Namespace, model: str, same: Sequence[str]) -> dict[str, object]:
    """Settings that must be the same in every run that adds results to ``--out``."""
    return {"model": model, **{name: _plain(getattr(args, name)) for name in same if hasattr(args, name)}}


def _load(args: argparse.Namespace, longest: int) -> tuple[LoadedModel, list[Policy], str]:
    """The model, the policies to compare, and the model's name in tables."""
    loaded = load_from_config(_config(args, longest, args.quantization))
    if loaded.model.device.type == "cuda":
        torch.cuda.set_device(loaded.model.device)  # streams, events and kernels follow the thread's current device
    args.dtype = str(loaded.model.dtype).removeprefix("torch.")  # what auto chose on this machine
    if args.quantization != DEQUANTIZED:
        args.quantization = loaded.config.quantization  # the model's files can set it, too
    names, shape = args.kv or ["full", "turbo"], loaded.config.shape
    if args.vary:
        names, notes = args.vary.expand(names, shape)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
    name = f"{loaded.name}+{Path(args.adapter).name}" if args.adapter else loaded.name
    return loaded, local_policies(names, args.budget or (), shape), name


def _config(args: argparse.Namespace, longest: int, quantization: str | None) -> EngineConfig:
    return EngineConfig(
        args.model or EngineConfig.model,
        adapter=args.adapter,
        load_format=args.load_format,
        dtype=args.dtype,
        quantization=quantization,
        device=args.device,
        rope_theta=args.rope_theta,
        hf_overrides=args.hf_overrides,
        max_model_len=longest,
    )


def _local(args: argparse.Namespace) -> tuple[Answerer, Tokenizer, list[Policy], str]:
    loaded, policies, name = _load(args, max(args.length))
    return Forks(loaded, args.batch), loaded.tokenizer, policies, name


def _remote(args: argparse.Namespace) -> tuple[Answerer, Tokenizer, list[Policy], str]:
    source = args.tokenizer or args.model or EngineConfig.model
    try:
        tokenizer = load_tokenizer(source)
    except (ValueError, OSError) as error:
        asked = "" if args.tokenizer else "; name the tokenizer of the server's model with --tokenizer"
        raise ValueError(f"prompts are measured with the tokenizer of {source}: {one_line(error)}{asked}") from error
    server = Remote(args.base_url, args.model, lambda text: len(tokenizer.encode(text)), args.num_concurrent)
    return server, tokenizer, [served_policy(args.kv[0] if args.kv else "remote")], server.model


def _plain(value: object) -> object:
    if isinstance(value, list):
        return [_plain(element) for element in value]
    return str(value) if isinstance(value, Path) else value


class Answerer(Protocol):
    """Something that answers samples: a local model or a server."""

    def answers(self, work: Sequence[tuple[Sample, list[Policy]]]) -> Iterator[Prediction]:
        """Yields the requested policies' answers to the samples, as they arrive."""


def run(
    answerer: Answerer, samples: Sequence[Sample], policies: Sequence[Policy], folder: Path, model: str
) -> list[Prediction]:
    """Answers the samples that have no answer in ``folder`` yet. Writes the summaries at the end, even after an error
    or an interrupt.

    Returns all answers in ``folder``.
    """
    file = PredictionFile(folder / "predictions.jsonl")
    answered = file.answered()
    work: list[tuple[Sample, list[Policy]]] = []
    for sample in samples:
        name = (sample.task, sample.length, sample.id)
        missing = [policy for policy in policies if (name, policy.label) not in answered]
        if missing:
            work.append((sample, missing))
    total = len(samples) * len(policies)
    unanswered = sum(len(missing) for _, missing in work)
    bar = tqdm(total=total, initial=total - unanswered, unit="answer", smoothing=0)
    try:
        for prediction in answerer.answers(work):
            file.append(prediction)
            bar.set_postfix_str(f"{prediction.task} {prediction.length} {prediction.policy} {prediction.score:.2f}")
            bar.update()
    finally:
        bar.close()
        if file.predictions:
            write_outputs(file.predictions, model, folder)
    return file.predictions
