"""Whether a decode step loses less if an error bound, and not a fixed number, says how many tokens each kv head reads.

The prompt is computed once, exactly. It is forked into one row for each rule, and all rows follow the tokens that full
attention generates. Keys and values are exact, so only the selection differs. A rule has three parts:

- ``draw``: how tokens are drawn. ``sketch`` is the step's own op, ``select_by_sketch``: half of the tokens are those
  with the best scores, half are sampled. ``exact`` samples in proportion to the largest share of the exact softmax that
  a query of the kv head gives a token.
- ``number``: what says how many. ``fixed`` is the same number for all heads. ``sketch`` and ``exact`` take the least
  number for which the standard deviation of every query's sum of attention weights is at most ``amount``, as a share of
  the whole softmax, exact tokens included. ``sketch`` computes it from the scores of the sketch, ``exact`` from exact
  ones.
- ``amount``: the number of tokens, or the error.

Results are rows of a CSV file, one for each prompt and rule. Prompts that the file has are not measured again.
``--summary`` prints means over prompts with 95 % intervals (bootstrap over prompts).

    python -m benchmarks.step_budgets --length 8192 --text essays code logs tables --prompts 2 --out FILE
    python -m benchmarks.step_budgets --out FILE --summary
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.sweeps.engines import add_model_arguments, model_of
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.startup.loading import load_from_config
from shadowkv.eval.fidelity.follow import kl_divergence
from shadowkv.eval.fidelity.observed import ObservedCache
from shadowkv.eval.fidelity.prompts import NAMED, Prompt, read_prompts
from shadowkv.eval.provenance import provenance
from shadowkv.eval.running.caches import open_cache, open_cache_as, prefill, prefill_all
from shadowkv.eval.suites import ruler
from shadowkv.kvcache import parts
from shadowkv.kvcache.decode.batch import DecodeBatch
from shadowkv.kvcache.memory.compressed import CompressedBatch, CompressedStore
from shadowkv.kvcache.parts.base import Selection
from shadowkv.kvcache.parts.index_sketch import Sketch
from shadowkv.kvcache.presets import preset
from shadowkv.models.loader import LoadedModel
from shadowkv.ops.sampling import CAUTION, Sampling
from shadowkv.ops.select_blocks.reference import systematic
from shadowkv.ops.select_by_sketch.reference import CHUNK_SHARPNESS, log_sharpness
from shadowkv.ops.sign_scores.reference import EXCLUDED_SCALE, decode_scale, plane_bits

LEAST, CAP = 32, 3840
"""Least and largest number of tokens that an error may ask for. The largest is four times the default's number."""

CANDIDATES = torch.tensor(sorted({round(LEAST * 2 ** (step / 4)) for step in range(28)} | {CAP}))
PER_OCTAVE, BINS = 8, 320
"""Weights are counted in bins of an eighth of an octave, down to 2**-40 of the largest."""


@dataclass(frozen=True)
class Rule:
    """How a row selects tokens; see the module."""

    draw: str
    number: str
    amount: float


RULES = (
    *(Rule("sketch", "fixed", tokens) for tokens in (240, 480, 960, 1920, 3840)),
    *(Rule("sketch", "sketch", error) for error in (0.04, 0.02, 0.01, 0.005)),
    Rule("sketch", "exact", 0.02),
    *(Rule("exact", "exact", error) for error in (0.02, 0.01, 0.005)),
    *(Rule("exact", "fixed", tokens) for tokens in (240, 480, 960)),
)
"""Rows in this order: rules that need scores of the sketch, or exact ones, are neighbours."""
BY_SKETCH = slice(sum(rule.draw == "sketch" for rule in RULES))
BY_EXACT = slice(BY_SKETCH.stop, None)
SKETCH_ERRORS = slice(sum(rule.number == "fixed" for rule in RULES[BY_SKETCH]), BY_SKETCH.stop)
EXACT_SCORES = slice(next(n for n, rule in enumerate(RULES) if "exact" in (rule.draw, rule.number)), None)
AMOUNTS = torch.tensor([rule.amount for rule in RULES])


class Histogram:
    """Tokens by weight, from the largest down, with sums over all bins from each one on.

    Args:
        log_weight: log2 of the weights, float32 [R, H, T]; -inf for tokens that may not be drawn.
        shares: of the softmax, float32 [R, H, G, T].
    """

    def __init__(self, log_weight: Tensor, shares: Tensor) -> None:
        largest = log_weight.amax(-1, keepdim=True)
        down = largest - log_weight
        bins = (PER_OCTAVE * down).clamp(max=BINS - 1).long()
        weight = (-down).exp2()
        squares = shares.square().masked_fill(log_weight.isneginf().unsqueeze(2), 0)
        over = squares / weight.clamp(min=2**-40).unsqueeze(2)
        self.largest = largest
        self.above = self._sums((weight > 0).float(), bins).flip(-1).cumsum(-1).flip(-1)
        self.above = self.above[..., :1] - self.above  # tokens in the bins before each
        self.weight = self._sums(weight, bins).flip(-1).cumsum(-1).flip(-1)
        repeated = bins.unsqueeze(2).expand_as(shares)
        self.squares = self._sums(squares, repeated).flip(-1).cumsum(-1).flip(-1)
        self.over = self._sums(over, repeated).flip(-1).cumsum(-1).flip(-1)

    @staticmethod
    def _sums(x: Tensor, bins: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], BINS + 1).scatter_add_(-1, bins, x)

    def error(self, factor: Tensor, certain: Tensor) -> Tensor:
        """Returns the largest standard deviation of any query, [R, H, n].

        Args:
            factor: of weights, to make them probabilities, [R, H, n].
            certain: number of the first bins whose tokens are all drawn, int64 [R, H, n].
        """
        at = certain.unsqueeze(2).expand(-1, -1, self.over.shape[2], -1)
        variance = self.over.gather(-1, at) / factor.unsqueeze(2) - self.squares.gather(-1, at)
        return variance.amax(2).clamp(min=0).sqrt()


def numbers_of_sketch(log_weight: Tensor, shares: Tensor, errors: Tensor) -> Tensor:
    """Returns the least of ``CANDIDATES`` with at most ``errors`` [R], if half of it are the tokens of the largest
    weights and half are sampled by weight: int64 [R, H]. It is ``CAP`` if there is none."""
    histogram = Histogram(log_weight, shares)
    count = CANDIDATES.float().expand(*log_weight.shape[:2], -1).contiguous()
    top = torch.searchsorted(histogram.above, count / 2, right=True) - 1
    sampled = CAUTION * (count - histogram.above.gather(-1, top))
    factor = sampled / histogram.weight.gather(-1, top).clamp(min=1e-30)
    certain = torch.maximum(top, (PER_OCTAVE * factor.log2()).floor().clamp(0, BINS).long())
    enough = histogram.error(factor, certain) <= errors[:, None, None]
    enough[..., -1] = True
    return CANDIDATES[enough.int().argmax(-1)]


def probabilities(shares: Tensor, amounts: Tensor, by_error: Tensor) -> Tensor:
    """Returns probabilities [R, H, T] in proportion to the largest share of any query: their sum is ``amounts`` [R], or
    where ``by_error`` bool [R] they are the least with this error, with a sum from ``LEAST`` to ``CAP``."""
    largest = shares.amax(2)
    histogram = Histogram(largest.log2(), shares)
    bins = torch.arange(BINS + 1)
    factor = (bins / PER_OCTAVE).exp2().expand(*shares.shape[:2], -1)
    expected = histogram.above + factor * histogram.weight
    enough = histogram.error(factor, bins.expand(factor.shape)) <= amounts[:, None, None]
    enough[..., -1] = True
    wanted = expected.gather(-1, enough.int().argmax(-1, keepdim=True)).clamp(LEAST, CAP)
    wanted = torch.where(by_error[:, None, None], wanted, amounts[:, None, None].expand_as(wanted))
    at = (torch.searchsorted(expected.contiguous(), wanted.contiguous(), right=True) - 1).clamp(0, BINS - 1)
    left = histogram.weight.gather(-1, at)
    factor = torch.where(left > 0, (wanted - histogram.above.gather(-1, at)) / left, 2.0**40)
    return (factor * (largest.log2() - histogram.largest).exp2()).clamp(max=1)


class ByRule(Sketch):
    """An index with a rule for each row.

    Attributes:
        exact_lse: float32 [R, H_q], of the exact tokens, by the layer that is to select.
        counts: selected tokens of each call, int64 [R, H].
    """

    exact_lse: Tensor
    counts: list[Tensor]

    def reset(self) -> None:
        """Forgets a prompt."""
        self.counts = []
        self._shared: dict[tuple[str, int], Tensor] = {}

    def select(self, store: CompressedStore, layer: int, q: Tensor, batch: CompressedBatch) -> Selection:
        assert batch.sampling is not None and len(q) == len(RULES)
        heads = self.shape.num_kv_heads
        queries = store.ops.sketch_queries(q, store.state["sketch_query_map"][layer], batch.states)
        signs, rest, scale = (store.page[f"sketch_{name}"][layer] for name in ("signs", "rest", "scale"))
        excluded = (scale[batch.pages[:1]] == EXCLUDED_SCALE).transpose(1, 2).flatten(2).unsqueeze(2)
        grouped = q.unflatten(1, (heads, -1)) * q.shape[-1] ** -0.5

        rows = EXACT_SCORES
        exact = self._products("keys", store, layer, grouped[rows], batch.pages[rows]).masked_fill_(excluded, -math.inf)
        of_exact = self._shares(exact, self.exact_lse[rows])

        rows = SKETCH_ERRORS
        whole, unit = (x[rows] for x in queries.of_heads(heads))
        scores = self._products("sketch", store, layer, whole * unit[..., None], batch.pages[rows])
        scores.masked_fill_(excluded, -math.inf)
        mean = (grouped[rows] * store.state["sketch_mean"][layer][batch.states[rows]].unsqueeze(2)).sum(-1)
        length = queries.length.unflatten(1, (heads, -1))[rows].unsqueeze(-1)
        estimated = EXACT_SCORES.start - SKETCH_ERRORS.start
        logits = (length * scores + mean.unsqueeze(-1))[:estimated]
        of_sketch = self._shares(logits, self.exact_lse[rows][:estimated])
        shares = torch.cat((of_sketch, of_exact[: BY_SKETCH.stop - EXACT_SCORES.start]))
        log_weight = CHUNK_SHARPNESS * log_sharpness(queries, heads)[rows].unsqueeze(-1) * scores.amax(2)
        numbers = AMOUNTS[BY_SKETCH, None].long().expand(-1, heads).clone()
        numbers[rows] = numbers_of_sketch(log_weight, shares, AMOUNTS[rows])

        coarse = store.ops.sign_scores(queries, signs, scale, batch.pages, batch.num_pages)
        drawn = []
        for head in range(heads):  # the op takes a number for each row, so every head is a call of its own
            one, group = slice(head, head + 1), slice(head * grouped.shape[2], (head + 1) * grouped.shape[2])
            fields = (getattr(queries, name)[BY_SKETCH, group].contiguous() for name in queries.__dataclass_fields__)
            planes = (coarse[BY_SKETCH, one].contiguous(), signs[:, one], rest[:, one], scale[:, one])
            table, count = (batch.pages[BY_SKETCH], batch.num_pages[BY_SKETCH]), numbers[:, head]
            sampling = Sampling(count // 2, batch.sampling.seeds[BY_SKETCH])
            number, top = store.layers[layer] * heads + head, count - count // 2
            drawn.append(
                store.ops.select_by_sketch(type(queries)(*fields), *planes, *table, top, 1, CAP, sampling, number)
            )
        selected, log_stands_for = (torch.cat(x, 1) for x in zip(*drawn, strict=True))

        by_error = torch.tensor([rule.number != "fixed" for rule in RULES[BY_EXACT]])
        probability = probabilities(of_exact[-len(by_error) :], AMOUNTS[BY_EXACT], by_error)
        offset = batch.sampling.uniform(store.layers[layer], heads)[1][BY_EXACT].unsqueeze(-1)
        taken = systematic(probability, offset) & (probability > 0)
        place = torch.where(taken, taken.cumsum(-1) - 1, CAP).clamp(max=CAP)
        tokens = torch.arange(taken.shape[-1]).expand_as(place)
        others = torch.full((*taken.shape[:2], CAP + 1), -1).scatter_(-1, place, tokens)[..., :CAP]
        weights = -probability.log().gather(-1, others.clamp(min=0))
        chunks, log_weights = torch.cat((selected, others)), torch.cat((log_stands_for, weights))
        self.counts.append((chunks >= 0).sum(-1))
        return Selection(chunks, log_weights)

    def _shares(self, logits: Tensor, exact_lse: Tensor) -> Tensor:
        """Shares of the whole softmax, [R, H, G, T]."""
        whole = torch.logaddexp(logits.logsumexp(-1), exact_lse.view(logits.shape[:3]))
        return (logits - whole.unsqueeze(-1)).exp()

    def _products(self, name: str, store: CompressedStore, layer: int, queries: Tensor, pages: Tensor) -> Tensor:
        """Products [R, H, G, T] of queries [R, H, G, d] with all compressed keys, or with their sketches."""
        read: Callable[[Tensor], Tensor] = self._keys if name == "keys" else self._sketches

        def rows(page_ids: Tensor) -> Tensor:
            return read(page_ids, store, layer)  # [H, tokens, d]

        if (name, layer) not in self._shared:  # all rows share the prompt's pages
            self._shared[name, layer] = rows(pages[0])
        shared = self._shared[name, layer]
        flat = queries.transpose(0, 1).flatten(1, 2)  # [H, R * G, d]
        products = (flat @ shared.transpose(1, 2)).unflatten(1, (len(queries), -1)).transpose(0, 1)
        own = pages[:, shared.shape[1] // 64 :]
        if not own.shape[1]:
            return products.contiguous()
        tails = torch.stack([rows(page_ids) for page_ids in own])
        return torch.cat((products, queries @ tails.transpose(2, 3)), -1)

    def _keys(self, page_ids: Tensor, store: CompressedStore, layer: int) -> Tensor:
        return store.page["keys"][layer][page_ids].flatten(2, 3).transpose(0, 1).flatten(1, 2).float()

    def _sketches(self, page_ids: Tensor, store: CompressedStore, layer: int) -> Tensor:
        signs, rest, scale = (store.page[f"sketch_{name}"][layer][page_ids] for name in ("signs", "rest", "scale"))
        bits = 8 * signs.shape[-1]
        levels = 2 * plane_bits(signs, bits).float() + plane_bits(rest, bits) - 1.5
        return (levels * decode_scale(scale).unsqueeze(-1)).transpose(0, 1).flatten(1, 2)


class Follower:
    """The rows of all rules, and full attention, which they follow."""

    def __init__(self, loaded: LoadedModel, capacity: int) -> None:
        fields = {"keys": "dense", "values": "dense", "index": "by-rule", "sampled": 0.5, "budget": CAP}
        spec = preset("turbo", **fields, dense_below=0)
        self.loaded, self.capacity = loaded, capacity
        self.full = open_cache(loaded, preset("full"), capacity)
        self.cache = open_cache_as(ObservedCache, loaded, spec, capacity, len(RULES) + 1)
        (group,) = self.cache.groups
        self.index, self.store = group.layout.parts.index, group.store
        assert isinstance(self.index, ByRule)
        self.cache.query_hook = self._attend_exact

    def _attend_exact(self, layer: int, q: Tensor, batch: DecodeBatch) -> None:
        pages = self.store.k[layer], self.store.v[layer], batch.pages
        self.index.exact_lse = self.store.ops.paged_attention(q, *pages, batch.counts)[1]

    def follow(self, prompt: list[int], steps: int, ends: set[int]) -> Iterator[dict[str, str]]:
        """Yields a row of results for each rule."""
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
                if token in ends:
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
                "at_cap": (own_counts >= CAUTION * CAP - 64).float().mean(),
            }
            yield {
                "draw": rule.draw,
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


def summarise(path: Path) -> None:
    """Prints a table for every length: means over prompts, with 95 % intervals of KL."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    groups: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        for text in (row["text"], "all"):
            groups[row["length"], text, row["draw"], row["number"], row["amount"]].append(row)
    draws = np.random.default_rng(0)
    for key, own in sorted(groups.items(), key=lambda item: (item[0][:4], float(item[0][4]))):
        kl, top1, tokens, p95, worst = (
            np.array([float(row[name]) for row in own])
            for name in ("kl", "top1", "tokens", "tokens_p95", "tokens_of_worst_step")
        )
        means = kl[draws.integers(len(kl), size=(2000, len(kl)))].mean(1)
        low, high = np.quantile(means, (0.025, 0.975))
        print(
            f"{' '.join(key):42} n={len(kl):3} tokens {tokens.mean():6.0f} p95 {p95.mean():6.0f} worst step "
            f"{worst.mean():6.0f} KL {kl.mean():.4f} ({low:.4f} to {high:.4f}) top-1 {100 * top1.mean():.2f} %"
        )


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
    parser.add_argument("--out", type=Path, required=True, help="CSV file")
    parser.add_argument("--summary", action="store_true", help="only prints what the file has")
    args = parser.parse_args(argv)
    if args.summary:
        summarise(args.out)
        return 0
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
            start = time.perf_counter()
            about = {"length": str(args.length), "text": kind, "prompt": prompt.name}
            new = [about | row for row in follower.follow(prompt.tokens, steps, ends)]
            for row in new:
                row["commit"] = str(provenance()["commit"])
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
