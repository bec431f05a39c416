"""Measures how far steps are from full attention if a fixed number or an error bound says how many tokens they read.

The prompt is computed once, exactly. It is forked into one row for each rule (``rules.py``), and all rows follow the
tokens that full attention generates. Keys and values are exact, so only the selection differs.

Results are rows of a CSV file, one for each prompt and rule. Prompts that the file has are not measured again.
``--summary`` prints means over prompts, with 95 % intervals by bootstrap over prompts. It divides a rule's KL by that
of a fixed number at equal mean tokens, which is interpolated: with the rule's own draw and scores, and with the step's.

    python -m benchmarks.step_budgets --model smollm2-135m-64k --length 8224 --prompts 2 --out FILE
    python -m benchmarks.step_budgets --out FILE --summary
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

from benchmarks.step_budgets.rules import CAP, LARGEST, RULES, ByRule
from benchmarks.sweeps.engines import add_model_arguments, model_of
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.startup.loading import load_from_config
from shadowkv.eval.fidelity.follow import kl_divergence
from shadowkv.eval.fidelity.observed import ObservedCache
from shadowkv.eval.fidelity.prompts import NAMED, Prompt, read_prompts
from shadowkv.eval.provenance import commit
from shadowkv.eval.running.caches import open_cache, open_cache_as, prefill, prefill_all
from shadowkv.eval.suites import ruler
from shadowkv.kvcache import parts
from shadowkv.kvcache.decode.batch import DecodeBatch
from shadowkv.kvcache.presets import preset
from shadowkv.models.loader import LoadedModel


class RuledCache(ObservedCache):
    """A cache whose only group of layers has the index of all rules."""

    @property
    def index(self) -> ByRule:
        """The index."""
        index = self.groups[0].layout.parts.index
        assert isinstance(index, ByRule)
        return index

    def attend_exact(self, layer: int, q: Tensor, batch: DecodeBatch) -> None:
        """Gives the index the log-sum-exps of the exact tokens. It is the cache's query hook."""
        store = self.groups[0].store
        pages = store.k[layer], store.v[layer], batch.pages
        self.index.exact_lse = store.ops.paged_attention(q, *pages, batch.counts)[1]


class Follower:
    """The rows of all rules, and full attention, which they follow."""

    def __init__(self, loaded: LoadedModel, capacity: int) -> None:
        fields = {"keys": "dense", "values": "dense", "index": "by-rule", "sampled": 0.5, "budget": CAP}
        spec = preset("turbo", **fields, dense_below=0)
        self.loaded, self.capacity = loaded, capacity
        self.full = open_cache(loaded, preset("full"), capacity)
        self.cache = open_cache_as(RuledCache, loaded, spec, capacity, len(RULES) + 1)
        self.index = self.cache.index
        self.cache.query_hook = self.cache.attend_exact

    def follow(self, prompt: list[int], steps: int, ends: set[int], until: float) -> Iterator[dict[str, str]]:
        """Yields a row of results for each rule, of the steps up to ``until`` (``time.perf_counter``), at least one."""
        self.index.reset()
        model, length = self.loaded.model, len(prompt)
        (exact, stored), logits = prefill_all(model, [self.full, self.cache], prompt, self.capacity)
        shared = self.cache.fork_point(stored, length)
        rows = [self.cache.fork(stored, shared, length, self.capacity) for _ in RULES]
        prefill(model, self.cache, [(row, prompt[shared:]) for row in rows])
        full, ours = Runner(model, self.full), Runner(model, self.cache)
        token, kl, agrees = int(logits[0].argmax()), [], []
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
        for number, rule in enumerate(RULES):
            own_kl, own_counts = torch.stack(kl)[:, number], counts[:, :, number]
            quantiles = own_counts.flatten().quantile(torch.tensor([0.5, 0.95]))
            agreed = torch.stack(agrees)[:, number].float()
            figures = {
                "kl": own_kl.mean(),
                "kl_max": own_kl.max(),
                "top1": agreed.mean(),
                "all_top1": agreed.min(),
                "tokens": own_counts.mean(),
                "tokens_p50": quantiles[0],
                "tokens_p95": quantiles[1],
                "tokens_of_worst_step": own_counts.mean((1, 2)).max(),
                "at_cap": (own_counts >= LARGEST).float().mean(),
                "spread": own_counts.std(correction=0),
                "spread_of_heads": own_counts.mean(0).std(correction=0),
            }
            yield {
                "draw": rule.draw,
                "scores": rule.scores,
                "number": rule.number,
                "amount": f"{rule.amount:g}",
                "steps": str(len(kl)),
                **{name: f"{float(x):.5g}" for name, x in figures.items()},
                "tokens_by_layer": " ".join(f"{x:.0f}" for x in own_counts.mean((0, 2)).tolist()),
            }


def prompts_of(kind: str, loaded: LoadedModel, count: int, tokens: int, new: int) -> Iterator[tuple[Prompt, int]]:
    """Prompts of a kind of text or of a task of RULER, and how many tokens to follow at most."""
    if kind in NAMED:
        for prompt in read_prompts([Path(kind)], loaded.tokenizer, count, tokens):
            yield prompt, new
        return
    for sample in ruler.samples(kind, loaded.tokenizer, tokens + new, count, 71, None):
        encoded = loaded.tokenizer.encode(sample.turns[0], add_special_tokens=True)
        yield Prompt(f"{kind}:{sample.id}", encoded), min(new, sample.max_new_tokens)


COLUMNS = ("drawn by", "scores", "number by", "", "tokens", "95 % of heads", "worst step", "top-1, %", "KL")
RATIOS = ("KL over a fixed number's", "over the step's own")


def summarise(path: Path) -> None:
    """Prints a table for every length, over all its prompts and over those of each text."""
    measured: dict[tuple[str, str], dict[str, list[dict[str, str]]]] = defaultdict(lambda: defaultdict(list))
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            for text in ("all texts", row["text"]):
                measured[row["length"], text][row["prompt"]].append(row)
    for (length, text), prompts in measured.items():
        print(f"\n{text}, {length} tokens, prompts: {len(prompts)}\n\n| {' | '.join((*COLUMNS, *RATIOS))} |")
        print(f"| {' | '.join(3 * ('---',) + 8 * ('---:',))} |")
        _print_rules(list(prompts.values()))


def _print_rules(prompts: list[list[dict[str, str]]]) -> None:
    """Prints a line for every rule; ``prompts`` has the rows of each prompt, in the order of rules."""
    names = ("kl", "tokens", "top1", "tokens_p95", "tokens_of_worst_step")
    kl, tokens, top1, p95, worst = (np.array([[float(row[name]) for row in own] for own in prompts]) for name in names)
    draws = np.random.default_rng(0).integers(len(prompts), size=(2000, len(prompts)))
    kl_means, token_means = kl[draws].mean(1), tokens[draws].mean(1)
    kinds = [(row["draw"], row["scores"], row["number"]) for row in prompts[0]]
    for at, rule in enumerate(prompts[0]):
        over = []
        for other in ((*kinds[at][:2], "fixed"), ("halves", "sketch", "fixed")):
            fixed = [n for n, kind in enumerate(kinds) if kind == other]
            ratios = [_ratio(at, fixed, *means) for means in zip(kl_means, token_means, strict=True)]
            of_all = _ratio(at, fixed, kl.mean(0), tokens.mean(0))
            over.append("" if at in fixed else _interval(of_all, ratios, 2))
        texts = (*kinds[at], rule["amount"])
        means = (f"{x[:, at].mean():.0f}" for x in (tokens, p95, worst))
        figures = (f"{100 * top1[:, at].mean():.1f}", _interval(kl[:, at].mean(), kl_means[:, at], 5))
        print(f"| {' | '.join((*texts, *means, *figures, *over))} |")


def _ratio(at: int, fixed: list[int], kl: np.ndarray, tokens: np.ndarray) -> float:
    """A rule's KL, divided by that of a fixed number at its mean tokens. NaN if no fixed numbers are around it."""
    log_tokens, log_kl = np.log(tokens), np.log(kl)
    others = np.interp(log_tokens[at], log_tokens[fixed], log_kl[fixed], left=np.nan, right=np.nan)
    return float(np.exp(log_kl[at] - others))


def _interval(mean: float, draws: Sequence[float] | np.ndarray, digits: int) -> str:
    low, high = np.quantile(draws, (0.025, 0.975))
    return "" if np.isnan(low + mean + high) else f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    kinds = (*NAMED, *ruler.TASKS)
    texts = ["essays", "code", "logs", "tables"]
    parser.add_argument("--text", nargs="+", default=texts, choices=kinds, metavar="KIND", help="of NAMED or RULER")
    parser.add_argument("--length", type=int, default=8192, metavar="TOKENS", help="of prompts (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=2, help="of each kind (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=96, help="to follow, at most (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3600, help="after which no step begins (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="CSV file")
    parser.add_argument("--summary", action="store_true", help="only prints what the file has")
    args = parser.parse_args(argv)
    if args.summary:
        summarise(args.out)
        return 0
    until = time.perf_counter() + args.seconds
    parts.register("index", "by-rule", ByRule)
    capacity = args.length + 2 * args.new_tokens
    loaded = load_from_config(EngineConfig(**model_of(args), max_model_len=capacity))
    ends = loaded.tokenizer.eos_token_ids | set(loaded.config.eos_token_ids)
    done = set()
    if args.out.exists():
        with args.out.open(newline="", encoding="utf-8") as file:
            done = {(row["length"], row["prompt"]) for row in csv.DictReader(file)}
    follower = Follower(loaded, capacity)
    for number in range(args.prompts):
        for kind in args.text:
            prompt, steps = list(prompts_of(kind, loaded, args.prompts, args.length, args.new_tokens))[number]
            if (str(args.length), prompt.name) in done:
                continue
            if time.perf_counter() > until:
                return 0
            start = time.perf_counter()
            about = {"commit": str(commit()), "length": str(args.length), "text": kind, "prompt": prompt.name}
            new = [about | row for row in follower.follow(prompt.tokens, steps, ends, until)]
            args.out.parent.mkdir(parents=True, exist_ok=True)
            fresh = not args.out.exists()
            with args.out.open("a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(new[0]), lineterminator="\n")
                if fresh:
                    writer.writeheader()
                writer.writerows(new)
            print(f"{prompt.name}: {time.perf_counter() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
