"""Measures, for several rules of selecting tokens, how far decode steps are from full attention.

The prompt is computed once, exactly. Its sequence is forked into one sequence for each rule (``rules.py``), and all
forks follow the tokens that full attention generates. Keys and values are exact, so only the selection differs.

Results are rows of a CSV file, one for each prompt and rule. Among others, a row has the KL to full attention, and the
relative error of attention's output compared with exact attention of the same queries. Prompts that the file already
has are not measured again. ``--summary`` prints means over prompts, and each rule's KL and error divided by those of
the former rule (``FORMER``), with 95 % intervals by bootstrap over prompts.

    python -m benchmarks.selection --model smollm2-135m-64k --length 8224 --prompts 2 --out FILE
    python -m benchmarks.selection --out FILE --summary
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.selection.prompts import add_prompt_arguments, in_turn
from benchmarks.selection.rules import FORMER, MOST, RULES, ByRule
from benchmarks.sweeps.engines import add_model_arguments, model_of
from benchmarks.sweeps.rows import append
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.scheduling.quality_meter import kl_divergence
from shadowkv.engine.startup.loading import load_from_config
from shadowkv.eval.fidelity.observed import Attended, ObservedCache
from shadowkv.eval.provenance import commit
from shadowkv.eval.running.caches import open_cache_as, prefill, prefill_all
from shadowkv.kvcache import parts
from shadowkv.kvcache.decode.decode_batch import DecodeBatch
from shadowkv.kvcache.presets import preset
from shadowkv.models.loader import LoadedModel


class RuledCache(ObservedCache):
    """A cache with one group of layers, whose index (``ByRule``) applies all rules."""

    @property
    def index(self) -> ByRule:
        """The index."""
        index = self.groups[0].layout.parts.index
        assert isinstance(index, ByRule)
        return index

    def attend_exact(self, layer: int, q: Tensor, batch: DecodeBatch) -> None:
        """The cache's query hook. Gives the index the log-sum-exps of the queries' logits with the tokens that stay
        exact."""
        store = self.groups[0].store
        pages = store.k[layer], store.v[layer], batch.pages
        self.index.exact_lse = store.ops.paged_attention(q, *pages, batch.counts)[1]


class Follower:
    """A sequence for each rule, and one with full attention, whose tokens the others follow.

    Args:
        capacity: maximum number of tokens of a sequence.
        seed: seed of the random numbers that rules select with.
    """

    def __init__(self, loaded: LoadedModel, capacity: int, seed: int = 0) -> None:
        fields = {"keys": "dense", "values": "dense", "index": "by-rule", "sampled": 0.5, "budget": MOST}
        spec = preset("turbo", **fields, dense_below=0)
        self.loaded, self.capacity, self.seed = loaded, capacity, seed
        self.full = open_cache_as(ObservedCache, loaded, preset("full"), capacity, 1)
        self.cache = open_cache_as(RuledCache, loaded, spec, capacity, len(RULES) + 1)
        self.index = self.cache.index
        self.cache.query_hook, self.cache.observe = self.cache.attend_exact, self.compare
        self.errors: list[Tensor] = []

    def compare(self, seen: Attended) -> None:
        """Adds the relative error of each row's output, [R] (R rows, one per rule), compared with exact attention of
        the same queries. The full cache has one sequence, so it computes the rows one by one."""
        assert self.full.batch is not None, "full attention comes first"
        exact = torch.cat([self.full.start(seen.layer, q, self.full.batch)() for q in seen.q.split(1)])
        exact, out = exact.flatten(1).double(), seen.out.flatten(1).double()
        self.errors.append((out - exact).norm(dim=1) / exact.norm(dim=1))

    def follow(self, prompt: list[int], steps: int, ends: set[int], until: float) -> Iterator[dict[str, str]]:
        """Yields a row of results for each rule. At most ``steps`` steps are measured. No step but the first begins
        after ``until`` (a time of ``time.perf_counter``), and none follows a token of ``ends``."""
        self.index.reset()
        model, length = self.loaded.model, len(prompt)
        (exact, stored), logits = prefill_all(model, [self.full, self.cache], prompt, self.capacity)
        shared = self.cache.fork_point(stored, length)
        rows = [self.cache.fork(stored, shared, length, self.capacity) for _ in RULES]
        for row in rows:
            row.seed = self.seed
        prefill(model, self.cache, [(row, prompt[shared:]) for row in rows])
        full, ours = Runner(model, self.full), Runner(model, self.cache)
        token, kl, agrees = int(logits[0].argmax()), [], []
        self.errors.clear()
        with torch.inference_mode():
            for _ in range(steps):
                if token in ends or (kl and time.perf_counter() > until):
                    break
                reference = full.decode([exact], [token])
                own = ours.decode(rows, [token] * len(rows))
                kl.append(kl_divergence(reference.expand_as(own), own))
                token = int(reference.argmax())
                agrees.append(own.argmax(-1) == token)
        for cache, sequence in ((self.full, exact), (self.cache, stored), *((self.cache, row) for row in rows)):
            cache.release(sequence)
        counts = torch.stack(self.index.counts).float().unflatten(0, (len(kl), -1))  # [steps, layers, R, H]
        errors = torch.stack(self.errors)
        for number, rule in enumerate(RULES):
            figures = {
                "tokens_selected": counts[:, :, number].mean(),
                "kl": torch.stack(kl)[:, number].mean(),
                "top1": torch.stack(agrees)[:, number].float().mean(),
                "output_error": errors[:, number].mean(),
            }
            yield {
                **{name: str(value) for name, value in vars(rule).items()},
                "steps": str(len(kl)),
                **{name: f"{float(x):.5g}" for name, x in figures.items()},
            }


OVER = "over the former rule's"
COLUMNS = ("weights", "draw", "runs", "tokens", "top-1, %", "KL, 10⁻³ nats", OVER, "output's error, %", OVER)


def rows_of(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a file of results. Raises ValueError for a file of an earlier version, which lacks some
    columns."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if missing := {"seed", "output_error"} - {*(reader.fieldnames or ())}:
            raise ValueError(f"{path} has no column {min(missing)}: an earlier version wrote it")
        return list(reader)


def summarise(rows: list[dict[str, str]]) -> None:
    """Prints tables for every length: one over all prompts, and one for each kind of text."""
    measured: dict[tuple[str, str], dict[tuple[str, str], list[dict[str, str]]]]
    measured = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for text in ("all texts", row["text"]):
            measured[row["length"], text][row["seed"], row["prompt"]].append(row)
    for (length, text), prompts in measured.items():
        print(f"\n{text}, {length} tokens, prompts: {len(prompts)}\n\n| {' | '.join(COLUMNS)} |")
        print(f"| {' | '.join(2 * ('---',) + 7 * ('---:',))} |")
        _print_rules(list(prompts.values()))


def _print_rules(prompts: list[list[dict[str, str]]]) -> None:
    """Prints a line for every rule. ``prompts`` has a list for each prompt: its rows, in the order of the rules."""
    kl, error, top1 = (
        np.array([[float(row[name]) for row in own] for own in prompts]) for name in ("kl", "output_error", "top1")
    )
    draws = np.random.default_rng(0).integers(len(prompts), size=(2000, len(prompts)))

    def over_former(x: np.ndarray, at: int) -> str:
        means = x[draws].mean(1)
        low, high = np.quantile(means[:, at] / means[:, FORMER], (0.025, 0.975))
        return f"{x[:, at].mean() / x[:, FORMER].mean():.2f} ({low:.2f} to {high:.2f})"

    for at, rule in enumerate(prompts[0]):
        parts_of = rule["weights"], rule["draw"], rule["runs"], rule["tokens"], f"{100 * top1[:, at].mean():.1f}"
        of_kl = f"{1e3 * kl[:, at].mean():.2f}", over_former(kl, at)
        of_error = f"{100 * error[:, at].mean():.2f}", over_former(error, at)
        print(f"| {' | '.join((*parts_of, *of_kl, *of_error))} |")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    add_prompt_arguments(parser, length=8192, prompts=2)
    parser.add_argument("--seconds", type=float, default=3600, help="after which no step begins (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        measured = rows_of(args.out) if args.summary or args.out.exists() else []
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if args.summary:
        summarise(measured)
        return 0
    until = time.perf_counter() + args.seconds
    parts.register("index", "by-rule", ByRule)
    capacity = args.length + 2 * args.new_tokens
    loaded = load_from_config(EngineConfig(**model_of(args), max_model_len=capacity))
    ends = loaded.tokenizer.eos_token_ids | set(loaded.config.eos_token_ids)
    done = {(row["seed"], row["length"], row["prompt"]) for row in measured}
    follower = Follower(loaded, capacity, args.seed)
    for kind, prompt, steps in in_turn(args, loaded):
        if (str(args.seed), str(args.length), prompt.name) in done:
            continue
        if time.perf_counter() > until:
            return 0
        start = time.perf_counter()
        about = {"commit": str(commit()), "seed": str(args.seed), "length": str(args.length)}
        about |= {"text": kind, "prompt": prompt.name}
        new = [about | row for row in follower.follow(prompt.tokens, steps, ends, until)]
        append(args.out, list(new[0]), new)
        print(f"{prompt.name}: {time.perf_counter() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
