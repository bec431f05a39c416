"""Measures whether decode steps of the policy can tell how far it is from full attention.

A narrow step selects a quarter of the policy's budget (``NARROW``), and is compared with the policy's own step after
the same tokens. The question is whether the difference of these two steps predicts the policy's KL to full attention,
which a server cannot measure. All steps follow the tokens that full attention generates.

Results are rows of a CSV file, one for each prompt and budget. Prompts that the file already has are not measured
again. ``--summary`` prints Spearman's rank correlation over prompts of each signal with the KL.

    python -m benchmarks.selection.quality_meter --model smollm2-135m-64k --length 4096 --prompts 4 --out FILE
    python -m benchmarks.selection.quality_meter --out FILE --summary
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.selection.prompts import KINDS, add_prompt_arguments, in_turn
from benchmarks.sweeps.engines import add_model_arguments, model_of
from benchmarks.sweeps.rows import append, read
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.scheduling.quality_meter import kl_divergence
from shadowkv.engine.startup.loading import load_from_config
from shadowkv.eval.fidelity.follow import acceptance_rate
from shadowkv.eval.fidelity.prompts import NAMED
from shadowkv.eval.provenance import commit
from shadowkv.eval.running.caches import open_cache, open_cache_as, prefill_all
from shadowkv.kvcache.decode.decode_batch import DecodePlan
from shadowkv.kvcache.decode.planning import NARROW
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.presets import preset
from shadowkv.models.loader import LoadedModel

BUDGETS = 160, 320, 640
"""Budgets of the policy, in tokens. The last is a multiple of all budgets, also of those of narrow steps."""
BANDS = 0, 0.001, 0.003, 0.01, 0.03, 0.1, 1
"""Bounds of ranges of the KL of narrow steps."""
COMPARED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": kl_divergence,
    "variation": lambda p, q: 1 - acceptance_rate(p, q),
    "disagreement": lambda p, q: (p.argmax(-1) != q.argmax(-1)).double(),
}
"""Distances of two next-token distributions, each of functions of their logits [n, V] to [n]: the KL, the total
variation, and whether their most likely tokens differ."""


class WidthsCache(KVCache):
    """A cache whose sequences are rows of one step. Each row selects its share of the budget, 1 in ``divisors``."""

    divisors: Sequence[int] = ()

    def plan_decode(self, *args: Any, **options: Any) -> DecodePlan:
        """Returns ``KVCache``'s plan with the rows' own budgets."""
        plan = super().plan_decode(*args, **options)
        (group,) = plan.groups
        top_k, sampled = (count // np.array(self.divisors) for count in (group.segments.top_k, group.segments.sampled))
        return replace(plan, groups=(replace(group, segments=group.segments._replace(top_k=top_k, sampled=sampled)),))


def follow(loaded: LoadedModel, prompt: list[int], steps: int, ends: set[int]) -> Iterator[dict[str, str]]:
    """Yields a row of results for each of ``BUDGETS``: distances of ``turbo`` from full attention (``full_*``), and of
    narrow steps from those of ``turbo`` (``narrow_*``), means over steps. No step follows a token of ``ends``."""
    capacity = len(prompt) + steps
    widths = sorted({width for budget in BUDGETS for width in (budget, budget // NARROW)})
    exact = open_cache(loaded, preset("full"), capacity)
    spec = preset("turbo", budget=widths[-1], dense_below=0)
    of_widths = open_cache_as(WidthsCache, loaded, spec, capacity, len(widths))
    of_widths.divisors = [widths[-1] // width for width in widths]
    (own, first), logits = prefill_all(loaded.model, [exact, of_widths], prompt, capacity)
    stored = of_widths.snapshots.export(first)
    rows = [first, *(of_widths.snapshots.load(stored, capacity) for _ in widths[1:])]
    full, turbo = Runner(loaded.model, exact), Runner(loaded.model, of_widths)
    token, by_step = int(logits[0].argmax()), []
    while len(by_step) < steps and token not in ends:
        reference = full.decode([own], [token])
        by_step.append(torch.cat((reference, turbo.decode(rows, [token] * len(rows)))))
        token = int(reference.argmax())
    by_row = torch.stack(by_step, 1)
    of_width = dict(zip(widths, by_row[1:], strict=True))
    for budget in BUDGETS:
        pairs = {"full": (by_row[0], of_width[budget]), "narrow": (of_width[budget], of_width[budget // NARROW])}
        figures = {
            f"{pair}_{name}": float(distance(*logits_of).mean())
            for pair, logits_of in pairs.items()
            for name, distance in COMPARED.items()
        }
        yield {"budget": str(budget), "steps": str(len(by_step)), **{name: f"{x:.5g}" for name, x in figures.items()}}


def ranks(x: np.ndarray) -> np.ndarray:
    """Ranks of x [..., n], from 0. Equal numbers share their mean rank."""
    above, equal = (compare(x[..., :, None], x[..., None, :]).sum(-1) for compare in (np.greater, np.equal))
    mean_rank: np.ndarray = above + (equal - 1) / 2
    return mean_rank


def rank_correlation(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation of x and y, both [..., n]: [...]. NaN where all numbers of x or of y are equal."""
    first, second = (rank - rank.mean(-1, keepdims=True) for rank in (ranks(x), ranks(y)))
    with np.errstate(invalid="ignore"):
        correlation: np.ndarray = (first * second).sum(-1) / np.sqrt((first**2).sum(-1) * (second**2).sum(-1))
    return correlation


def summarise(rows: list[dict[str, str]]) -> None:
    """Prints a table for each length: for all prompts and for texts alone, by budget and over all budgets."""
    columns = "prompts", "budget", "number", "KL, 10⁻³ nats", *COMPARED, "KL over narrow KL", "of 80 % of the prompts"
    for length in dict.fromkeys(row["length"] for row in rows):
        print(f"\n{length} tokens\n\n| {' | '.join(columns)} |\n|{' --- |' * 2}{' ---: |' * (len(columns) - 2)}")
        of_length = [row for row in rows if row["length"] == length]
        for name, kinds in {"all": KINDS, "texts": NAMED}.items():
            own = [row for row in of_length if row["text"] in kinds]
            for budget in (*map(str, BUDGETS), "all"):
                _print_budget(name, budget, [row for row in own if budget in ("all", row["budget"])])

        _print_bands(of_length)


def _print_bands(rows: list[dict[str, str]]) -> None:
    """Prints how far the policy is from full attention, by the KL of narrow steps, at all budgets together."""
    columns = "KL of narrow steps", "number", "KL to `full`", "other greedy token than `full`"
    print(f"\n| {' | '.join(columns)} |\n|{' ---: |' * len(columns)}")
    for low, high in pairwise(BANDS):
        own = [row for row in rows if low <= float(row["narrow_kl"]) < high]
        if own:
            kl, other = (np.array([float(row[name]) for row in own]) for name in ("full_kl", "full_disagreement"))
            cells = f"{low:g} to {high:g}", str(len(own)), f"{kl.mean():.4f} ({kl.min():.4f} to {kl.max():.4f})"
            print(f"| {' | '.join(cells)} | {other.mean():.1%} |")


def _print_budget(name: str, budget: str, rows: list[dict[str, str]]) -> None:
    """Prints a row: the correlation of each signal with the KL to full attention, and this KL divided by that of narrow
    steps. Intervals are 95 %, by bootstrap over prompts."""
    by_prompt: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        by_prompt.setdefault(row["prompt"], []).append(row)

    def figures(name: str) -> np.ndarray:
        return np.array([[float(row[name]) for row in of_prompt] for of_prompt in by_prompt.values()])

    count = len(by_prompt)
    draws = np.random.default_rng(0).integers(count, size=(2000, count))

    def with_interval(value: float, of_draws: np.ndarray) -> str:
        low, high = np.nanquantile(of_draws, (0.025, 0.975))  # few prompts: a draw can have one of them only
        return f"{value:.2f} ({low:.2f} to {high:.2f})"

    kl, narrow = figures("full_kl"), figures("narrow_kl")
    cells = [name, budget, str(count), f"{1e3 * kl.mean():.2f}"]
    for signal in (figures(f"narrow_{name}") for name in COMPARED):
        of_draws = rank_correlation(signal[draws].reshape(len(draws), -1), kl[draws].reshape(len(draws), -1))
        cells.append(with_interval(float(rank_correlation(signal.ravel(), kl.ravel())), of_draws))
    cells.append(with_interval(kl.mean() / narrow.mean(), kl[draws].mean((1, 2)) / narrow[draws].mean((1, 2))))
    cells.append("{:.2f} to {:.2f}".format(*np.quantile(kl / narrow, (0.1, 0.9))))
    print(f"| {' | '.join(cells)} |")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    add_prompt_arguments(parser, length=4096, prompts=4)
    args = parser.parse_args(argv)
    try:
        rows = read(args.out) if args.summary or args.out.exists() else []
    except OSError as error:
        parser.error(str(error))
    if args.summary:
        summarise(rows)
        return 0
    loaded = load_from_config(EngineConfig(**model_of(args), max_model_len=args.length + 2 * args.new_tokens))
    ends = loaded.tokenizer.eos_token_ids | set(loaded.config.eos_token_ids)
    done = {(row["length"], row["prompt"]) for row in rows}
    for kind, prompt, steps in in_turn(args, loaded):
        if (str(args.length), prompt.name) in done:
            continue
        start = time.perf_counter()
        about = {"commit": str(commit()), "length": str(args.length), "text": kind, "prompt": prompt.name}
        new = [about | row for row in follow(loaded, prompt.tokens, steps, ends)]
        append(args.out, list(new[0]), new)
        print(f"{prompt.name}: {time.perf_counter() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
