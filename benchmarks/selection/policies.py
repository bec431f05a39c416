"""Measures how far the decode steps of policies are from full attention, on texts and on RULER's samples.

The prompt is computed once for each kind of prefill attention. All policies follow the tokens that full attention
generates, up to the end of its answer. ``shadowkv eval fidelity`` does the same on texts; this script also takes the
tasks of RULER, whose answers are short.

Results are rows of a CSV file, one for each prompt and policy: means over steps of the KL to full attention, of the
total variation, and of how often the most likely token differs. Prompts that the file already has for all policies are
not measured again. ``--summary`` prints means over prompts, with each policy's KL divided by that of the first one.
Its intervals are 95 %, by bootstrap over prompts.

    python -m benchmarks.selection.policies --model smollm2-135m-64k --kv turbo turbo:budget=1280 --out FILE
    python -m benchmarks.selection.policies --out FILE --summary
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from benchmarks.selection.prompts import add_prompt_arguments, in_turn
from benchmarks.selection.quality_meter import COMPARED
from benchmarks.sweeps.engines import add_model_arguments, model_of
from benchmarks.sweeps.rows import append, read
from shadowkv.engine.config import EngineConfig, add_policies
from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.startup.loading import load_from_config
from shadowkv.eval.fidelity.prompts import NAMED
from shadowkv.eval.provenance import commit
from shadowkv.eval.running.caches import open_cache, prefill_all
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.kvcache.presets import preset
from shadowkv.models.loader import LoadedModel


def follow(
    loaded: LoadedModel, specs: Mapping[str, KVSpec], prompt: list[int], steps: int, ends: set[int]
) -> Iterator[dict[str, str]]:
    """Yields a row of results for each policy of ``specs``: means of its distances from full attention (``COMPARED``)
    over at most ``steps`` steps. No step follows a token of ``ends``."""
    capacity = len(prompt) + steps
    caches = [open_cache(loaded, spec, capacity) for spec in (preset("full"), *specs.values())]
    sequences, logits = prefill_all(loaded.model, caches, prompt, capacity)
    rows = [(Runner(loaded.model, cache), sequence) for cache, sequence in zip(caches, sequences, strict=True)]
    token, by_step = int(logits[0].argmax()), []
    while len(by_step) < steps and token not in ends:
        by_step.append(torch.cat([runner.decode([sequence], [token]) for runner, sequence in rows]))
        token = int(by_step[-1][0].argmax())
    if not by_step:
        return
    full, *own = torch.stack(by_step, 1)
    for kv, logits_of in zip(specs, own, strict=True):
        figures = {name: f"{float(distance(full, logits_of).mean()):.5g}" for name, distance in COMPARED.items()}
        yield {"kv": kv, "steps": str(len(by_step)), **figures}


def summarise(rows: list[dict[str, str]]) -> None:
    """Prints a table for each length, of texts and of RULER's tasks. Only prompts that every policy has are used."""
    for length in dict.fromkeys(row["length"] for row in rows):
        for name, named in (("texts", True), ("RULER", False)):
            own = [row for row in rows if row["length"] == length and (row["text"] in NAMED) == named]
            if own:
                _print_table(f"{name}, {length} tokens", own)


def _print_table(title: str, rows: list[dict[str, str]]) -> None:
    policies = list(dict.fromkeys(row["kv"] for row in rows))
    by_prompt: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for row in rows:
        by_prompt.setdefault((row["seed"], row["prompt"]), {})[row["kv"]] = row
    shared = [of_prompt for of_prompt in by_prompt.values() if len(of_prompt) == len(policies)]
    if not shared:
        print(f"\n{title}: no prompt has all policies")
        return
    kl, variation, disagreement = (
        np.array([[float(of_prompt[kv][name]) for kv in policies] for of_prompt in shared]) for name in COMPARED
    )
    draws = np.random.default_rng(0).integers(len(shared), size=(2000, len(shared)))
    ratio = kl[draws].mean(1) / kl[draws].mean(1)[:, :1]
    low, high = np.quantile(ratio, (0.025, 0.975), axis=0)
    print(f"\n{title}, prompts: {len(shared)}\n")
    print("| policy | KL, 10⁻³ nats | over the first | variation, % | other token, % |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for at, kv in enumerate(policies):
        over = f"{kl[:, at].mean() / kl[:, 0].mean():.2f} ({low[at]:.2f} to {high[at]:.2f})"
        shares = f"{100 * variation[:, at].mean():.2f} | {100 * disagreement[:, at].mean():.2f}"
        print(f"| `{kv}` | {1e3 * kl[:, at].mean():.2f} | {over} | {shares} |")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    add_policies(parser, "turbo")
    add_prompt_arguments(parser, length=8192, prompts=2)
    args = parser.parse_args(argv)
    try:
        rows = read(args.out) if args.summary or args.out.exists() else []
        specs = {kv: preset(kv, dense_below=0) for kv in args.kv}
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if args.summary:
        summarise(rows)
        return 0
    loaded = load_from_config(EngineConfig(**model_of(args), max_model_len=args.length + 2 * args.new_tokens))
    ends = loaded.tokenizer.eos_token_ids | set(loaded.config.eos_token_ids)
    done = {(row["seed"], row["length"], row["prompt"], row["kv"]) for row in rows}
    for kind, prompt, steps in in_turn(args, loaded):
        seed, length = str(args.seed), str(args.length)
        left = {kv: spec for kv, spec in specs.items() if (seed, length, prompt.name, kv) not in done}
        if not left:
            continue
        start = time.perf_counter()
        about = {"commit": str(commit()), "seed": seed, "length": length, "text": kind, "prompt": prompt.name}
        new = [about | row for row in follow(loaded, left, prompt.tokens, steps, ends)]
        if new:
            append(args.out, list(new[0]), new)
        print(f"{prompt.name}: {time.perf_counter() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
