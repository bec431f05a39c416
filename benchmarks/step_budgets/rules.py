"""Rules by which rows of a step select tokens, and an index that gives each row of a batch its own rule.

A rule has four parts:

- ``draw``: how tokens are drawn. ``halves`` is the step's own op, ``select_by_sketch``: half of the tokens are those
  with the best scores, half are sampled by flattened weights. ``shares`` is what a sparse prefill does with blocks: the
  probability of a token is a factor times the largest share of the softmax that a query of the kv head gives it, at
  most 1.
- ``scores``: ``sketch`` has the scores that a step has: signs choose runs of 8 tokens, of which a quarter is sampled,
  and all bits score the tokens of these runs. ``exact`` has exact scores of all tokens.
- ``number``: what says how many tokens a kv head draws. ``fixed`` is the same number for all. ``error`` is the least
  number for which every query's sum of attention weights has a standard deviation of at most ``amount``, as a share of
  the whole softmax, exact tokens included. The scores say it; the variance of sampling runs is left out. ``mean`` is
  what ``error`` took for the same layer and kv head, averaged over this step and all earlier ones.
- ``amount``: the number of tokens, or the error.

Shapes: R rows, H kv heads, G query heads of each, T compressed tokens, d dimensions of a head.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.kvcache.memory.compressed import CompressedBatch, CompressedStore
from shadowkv.kvcache.parts.base import Selection
from shadowkv.kvcache.parts.index_sketch import Sketch
from shadowkv.kvcache.policy.spec import PAGE, SKETCH_BUDGET
from shadowkv.ops.sampling import CAUTION, Sampling, systematic_sample
from shadowkv.ops.select_blocks.reference import systematic
from shadowkv.ops.select_by_sketch.reference import (
    CHUNK_SHARPNESS,
    RUN_SHARPNESS,
    SAMPLED_SHARE,
    kept_runs,
    mean_length,
)
from shadowkv.ops.sign_scores.reference import EXCLUDED_SCALE, RUN, decode_scale, plane_bits

LEAST, CAP = 32, 3840
"""Least and largest number of tokens that an error may ask for. The largest is four times the default's number."""

CANDIDATES = torch.tensor(sorted({round(LEAST * 2 ** (step / 4)) for step in range(28)} | {CAP}))
LARGEST = int(CAUTION * CAP) - 64
"""Heads that drew this many tokens or more had reached ``CAP``: samples are a few fewer than wanted."""

PER_OCTAVE, BINS = 8, 320
"""Weights are counted in bins of an eighth of an octave, down to 2**-40 of the largest."""


@dataclass(frozen=True)
class Rule:
    """The parts of a rule, as the module says."""

    draw: str
    scores: str
    number: str
    amount: float


RULES = (
    *(Rule("halves", "sketch", "fixed", tokens) for tokens in (240, 480, 960, 1920, 3840)),
    Rule("halves", "sketch", "mean", 0.02),
    *(Rule("halves", "sketch", "error", error) for error in (0.04, 0.02, 0.01)),
    *(Rule("shares", "sketch", "fixed", tokens) for tokens in (240, 480, 960)),
    *(Rule("shares", "sketch", "error", error) for error in (0.04, 0.02, 0.01)),
    *(Rule("shares", "exact", "fixed", tokens) for tokens in (240, 480, 960)),
    *(Rule("shares", "exact", "error", error) for error in (0.04, 0.02, 0.01)),
)
"""Rows in this order: rules that need the same scores are neighbours."""
HALVES = slice(sum(rule.draw == "halves" for rule in RULES))
SHARES = slice(HALVES.stop, None)
SKETCH = slice(RULES.index(Rule("halves", "sketch", "error", 0.04)), sum(rule.scores == "sketch" for rule in RULES))
ERRORS = HALVES.stop - SKETCH.start  # rules of ``halves`` with an error
EXACT = slice(SKETCH.stop, None)
MEAN, OF = (RULES.index(Rule("halves", "sketch", number, 0.02)) for number in ("mean", "error"))
AMOUNTS = torch.tensor([rule.amount for rule in RULES])
BY_ERROR = torch.tensor([rule.number == "error" for rule in RULES])


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


def numbers_of_halves(log_weight: Tensor, shares: Tensor, errors: Tensor) -> Tensor:
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
        self._taken: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._shared: dict[tuple[str, int], Tensor] = {}

    def select(self, store: CompressedStore, layer: int, q: Tensor, batch: CompressedBatch) -> Selection:
        assert batch.sampling is not None and len(q) == len(RULES)
        heads = self.shape.num_kv_heads
        uniform = batch.sampling.uniform(store.layers[layer], heads)
        queries = store.ops.sketch_queries(q, store.state["sketch_query_map"][layer], batch.states)
        signs, rest, scale = (store.page[f"sketch_{name}"][layer] for name in ("signs", "rest", "scale"))
        excluded = (scale[batch.pages[:1]] == EXCLUDED_SCALE).transpose(1, 2).flatten(2).unsqueeze(2)
        grouped = q.unflatten(1, (heads, -1)) * q.shape[-1] ** -0.5
        coarse = store.ops.sign_scores(queries, signs, scale, batch.pages, batch.num_pages)
        sharpness = mean_length(queries, heads) / math.log(2)

        rows = SKETCH
        keep = kept_runs(batch.num_pages, torch.full_like(batch.num_pages, SKETCH_BUDGET[1]), 1)[rows]
        few = keep < coarse.shape[-1]
        wanted = keep[:, None].expand(-1, heads)
        best = torch.where(few[:, None], wanted - wanted // SAMPLED_SHARE, wanted)
        kept, chance = systematic_sample(coarse[rows], best, wanted, RUN_SHARPNESS * sharpness[rows], uniform[0][rows])
        log_chance = chance.masked_fill(~kept, 0).log2().repeat_interleave(RUN, -1)  # -inf: not kept
        whole, unit = (x[rows] for x in queries.of_heads(heads))
        scores = self._products("sketch", store, layer, whole * unit[..., None], batch.pages[rows])
        scores.masked_fill_(excluded | log_chance.isneginf().unsqueeze(2), -math.inf)
        mean = (grouped[rows] * store.state["sketch_mean"][layer][batch.states[rows]].unsqueeze(2)).sum(-1)
        length = queries.length.unflatten(1, (heads, -1))[rows].unsqueeze(-1)
        logits = length * scores + mean.unsqueeze(-1) - math.log(2) * log_chance.clamp(min=-99).unsqueeze(2)
        of_sketch = self._shares(logits, self.exact_lse[rows])
        log_weight = CHUNK_SHARPNESS / math.log(2) * (length * scores).amax(2) - log_chance.clamp(min=-99)
        exact = self._products("keys", store, layer, grouped[EXACT], batch.pages[EXACT]).masked_fill_(
            excluded, -math.inf
        )
        of_exact = self._shares(exact, self.exact_lse[EXACT])

        numbers = AMOUNTS[HALVES, None].long().expand(-1, heads).clone()
        numbers[BY_ERROR[HALVES]] = numbers_of_halves(log_weight[:ERRORS], of_sketch[:ERRORS], AMOUNTS[rows][:ERRORS])
        self._taken[layer].append(numbers[OF])
        numbers[MEAN] = torch.stack(self._taken[layer]).float().mean(0).round()
        drawn = []
        for head in range(heads):  # the op takes a number for each row, so every head is a call of its own
            one, group = slice(head, head + 1), slice(head * grouped.shape[2], (head + 1) * grouped.shape[2])
            fields = (getattr(queries, name)[HALVES, group].contiguous() for name in queries.__dataclass_fields__)
            planes = (coarse[HALVES, one].contiguous(), signs[:, one], rest[:, one], scale[:, one])
            table, count = (batch.pages[HALVES], batch.num_pages[HALVES]), numbers[:, head]
            sampling = Sampling(count // 2, batch.sampling.seeds[HALVES])
            number, top = store.layers[layer] * heads + head, count - count // 2
            drawn.append(
                store.ops.select_by_sketch(type(queries)(*fields), *planes, *table, top, 1, CAP, sampling, number)
            )
        selected, log_stands_for = (torch.cat(x, 1) for x in zip(*drawn, strict=True))

        probability = probabilities(torch.cat((of_sketch[ERRORS:], of_exact)), AMOUNTS[SHARES], BY_ERROR[SHARES])
        taken = systematic(probability, uniform[1][SHARES].unsqueeze(-1)) & (probability > 0)
        place = torch.where(taken, taken.cumsum(-1) - 1, CAP).clamp(max=CAP)
        tokens = torch.arange(taken.shape[-1]).expand_as(place)
        others = torch.full((*taken.shape[:2], CAP + 1), -1).scatter_(-1, place, tokens)[..., :CAP]
        stands_for = -probability.log()
        stands_for[: len(log_chance) - ERRORS] -= math.log(2) * log_chance[ERRORS:]
        chunks = torch.cat((selected, others))
        self.counts.append((chunks >= 0).sum(-1))
        return Selection(chunks, torch.cat((log_stands_for, stands_for.gather(-1, others.clamp(min=0)))))

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
        own = pages[:, shared.shape[1] // PAGE :]
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
