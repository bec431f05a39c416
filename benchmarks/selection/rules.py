"""Rules by which a step selects tokens with a sketch, and an index that gives each row of a batch its own rule.

A rule has four parts:

- ``weights``: how a token's weight is computed. With ``unit`` it is the token's largest product with a query that is
  scaled to length 1, times the mean length of the kv head's queries. With ``logits`` it is the token's largest logit
  with any query. With ``kept`` and ``shares`` it is the logarithm of the largest share that any query's softmax gives
  the token. For ``kept``, the softmax is over the examined runs; for ``shares``, the softmax also includes the tokens
  that stay exact.
- ``draw``: how tokens are drawn. ``halves`` selects half of the tokens by the largest weights, and samples the other
  half in proportion to weights. ``chances`` samples each token with a probability in proportion to its weight, at most
  1.
- ``runs``: how many runs of 8 tokens are examined, as a multiple of ``FORMER_RUNS``.
- ``tokens``: how many tokens are selected.

Shapes: R rows, H kv heads, G query heads of each, T compressed tokens, d dimensions of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.kvcache.memory.compressed import CompressedBatch, CompressedStore
from shadowkv.kvcache.parts.base import Selection
from shadowkv.kvcache.parts.index_sketch import Sketch
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.ops.sampling import systematic_sample
from shadowkv.ops.select_blocks.reference import systematic
from shadowkv.ops.select_by_sketch.reference import CHUNK_SHARPNESS, RUN_SHARPNESS, SAMPLED_SHARE, mean_length
from shadowkv.ops.sign_scores.reference import EXCLUDED_SCALE, RUN, decode_scale, plane_bits

FORMER_RUNS = 480
"""Number of runs that a step examined, in contexts of up to 61,440 tokens, under the former rule, which selected 960
tokens."""
SHARE_SHARPNESS = 0.85
"""Exponent of a token's share in its weight."""
MOST = 960
"""Number of columns of a selection: the largest ``tokens`` of all rules."""
PER_OCTAVE, BINS = 8, 320
"""Bins per octave (factor of 2), and number of bins. The bins of weights reach down to 2**-40 of the largest weight."""


@dataclass(frozen=True)
class Rule:
    """The parts of a rule, as in the module's docstring."""

    weights: str
    draw: str
    runs: float
    tokens: int


RULES = (
    *(Rule("unit", "halves", 1, tokens) for tokens in (480, 960)),
    *(Rule("logits", "halves", 1, tokens) for tokens in (480, 640, 960)),
    *(Rule("logits", "halves", 1.5, tokens) for tokens in (480, 640, 960)),
    *(Rule("logits", "halves", 2, tokens) for tokens in (320, 480, 640, 960)),
    *(Rule("logits", "halves", 3, tokens) for tokens in (480, 640)),
    *(Rule("logits", "chances", runs, tokens) for runs, tokens in ((1.5, 640), (2, 480))),
    *(Rule("kept", "halves", runs, 480) for runs in (1, 2)),
    *(Rule("shares", "chances", runs, tokens) for runs, tokens in ((1, 480), (1, 960), (2, 480))),
)
FORMER, TAKEN = RULES.index(Rule("unit", "halves", 1, 960)), RULES.index(Rule("logits", "halves", 1.5, 640))
"""Indices in ``RULES`` of the rule that the engine used formerly, and of the one that it uses now."""


def chances(log_weight: Tensor, tokens: int) -> Tensor:
    """Returns probabilities, float32 [H, T], in proportion to weights, at most 1, with a sum of about ``tokens``.

    Args:
        log_weight: float32 [H, T], logarithms of the weights to base 2; -inf for tokens that may not be drawn.
    """
    down = log_weight.amax(-1, keepdim=True) - log_weight
    bins, weight = (PER_OCTAVE * down).clamp(max=BINS - 1).long(), (-down).exp2()

    def from_each_bin_on(x: Tensor) -> Tensor:
        sums = x.new_zeros(len(x), BINS + 1).scatter_add_(-1, bins, x)
        return sums.flip(-1).cumsum(-1).flip(-1)

    number, weights = from_each_bin_on((weight > 0).float()), from_each_bin_on(weight)
    above = number[:, :1] - number
    expected = above + (torch.arange(BINS + 1, device=weight.device) / PER_OCTAVE).exp2() * weights
    wanted = torch.full_like(above[:, :1], tokens)
    at = (torch.searchsorted(expected.contiguous(), wanted, right=True) - 1).clamp(0, BINS - 1)
    left = weights.gather(-1, at)
    return (torch.where(left > 0, (wanted - above.gather(-1, at)) / left, 2.0**40) * weight).clamp(max=1)


class ByRule(Sketch):
    """An index that applies the rule ``RULES[i]`` to row i of a batch.

    Attributes:
        exact_lse: float32 [R, H_q] (H_q query heads), log-sum-exps over the tokens that stay exact, in the current
            layer.
        counts: for each call of ``select``, the number of selected tokens, int64 [R, H].
    """

    exact_lse: Tensor
    counts: list[Tensor]

    def reset(self) -> None:
        """Forgets the counts and the cached sketches of the last prompt."""
        self.counts = []
        self._shared: dict[int, Tensor] = {}

    def select(self, store: CompressedStore, layer: int, q: Tensor, batch: CompressedBatch) -> Selection:
        assert batch.sampling is not None and len(q) == len(RULES)
        heads, device = self.shape.num_kv_heads, q.device
        of_runs, of_tokens = batch.sampling.uniform(store.layers[layer], heads)
        queries = store.ops.sketch_queries(q, store.state["sketch_query_map"][layer], batch.states)
        signs, scale = store.page["sketch_signs"][layer], store.page["sketch_scale"][layer]
        coarse = store.ops.sign_scores(queries, signs, scale, batch.pages, batch.num_pages)

        factor = torch.tensor([rule.runs for rule in RULES], device=device)
        keep = torch.minimum((FORMER_RUNS * factor).long(), PAGE // RUN * batch.num_pages)
        best = torch.where(keep < PAGE // RUN * batch.num_pages, keep - keep // SAMPLED_SHARE, keep)
        length = mean_length(queries, heads)
        numbers = (x[:, None].expand(-1, heads) for x in (best, keep))
        kept, chance = systematic_sample(coarse, *numbers, RUN_SHARPNESS / math.log(2) * length, of_runs)
        edge = length * coarse.float().masked_fill(chance == 1, -math.inf).amax(-1)  # as in the op, 0 if all are kept
        edge = edge.masked_fill(edge.isneginf(), 0).unsqueeze(-1)
        log_chance = chance.masked_fill(~kept, 0).log2().repeat_interleave(RUN, -1)  # -inf: not kept
        excluded = (scale[batch.pages] == EXCLUDED_SCALE).transpose(1, 2).flatten(2)
        never, stands_for = excluded | log_chance.isneginf(), -log_chance.clamp(min=-99)

        whole, unit = queries.of_heads(heads)
        products = self._products(store, layer, whole * unit[..., None], batch.pages)
        products = products.masked_fill(never.unsqueeze(2), -math.inf)
        mean = q.unflatten(1, (heads, -1)) * store.state["sketch_mean"][layer][batch.states].unsqueeze(2)
        logits = queries.length.unflatten(1, (heads, -1)).unsqueeze(-1) * products
        of_kept = (logits + math.log(2) * stands_for.unsqueeze(2)).logsumexp(-1)
        middle = mean.sum(-1) * q.shape[-1] ** -0.5  # the mean key's logit, which products leave out
        of_all = torch.logaddexp(of_kept + middle, self.exact_lse.view_as(of_kept)) - middle

        probability = torch.zeros_like(stands_for)
        taken = torch.zeros_like(never)
        for row, rule in enumerate(RULES):
            if rule.weights == "unit":
                weight = CHUNK_SHARPNESS * (length[row, :, None] * products[row].amax(1) - edge[row])
            elif rule.weights == "logits":
                weight = CHUNK_SHARPNESS * (logits[row].amax(1) - edge[row])
            else:
                sums = (of_kept if rule.weights == "kept" else of_all)[row]
                weight = SHARE_SHARPNESS * (logits[row] - sums.unsqueeze(-1)).amax(1)
            weight = weight / math.log(2) + stands_for[row]
            if rule.draw == "halves":
                numbers = (torch.full((heads,), x, device=device) for x in (-(-rule.tokens // 2), rule.tokens))
                one = torch.ones(heads, device=device)
                taken[row], probability[row] = systematic_sample(weight.half(), *numbers, one, of_tokens[row])
            else:
                probability[row] = chances(weight, rule.tokens)
                taken[row] = systematic(probability[row], of_tokens[row].unsqueeze(-1)) & (probability[row] > 0)
        place = torch.where(taken, taken.cumsum(-1) - 1, MOST).clamp(max=MOST)
        tokens = torch.arange(taken.shape[-1], device=device).expand_as(place)
        selected = torch.full((*taken.shape[:2], MOST + 1), -1, device=device).scatter_(-1, place, tokens)[..., :MOST]
        self.counts.append((selected >= 0).sum(-1))
        log_weight = math.log(2) * stands_for - probability.log()
        return Selection(selected, log_weight.gather(-1, selected.clamp(min=0)))

    def _products(self, store: CompressedStore, layer: int, queries: Tensor, pages: Tensor) -> Tensor:
        """Products [R, H, G, T] of queries [R, H, G, d] with the sketches of all compressed tokens."""

        def read(page_ids: Tensor) -> Tensor:
            return self._sketches(page_ids, store, layer)

        if layer not in self._shared:  # all rows share the prompt's pages
            self._shared[layer] = read(pages[0])
        shared = self._shared[layer]
        flat = queries.transpose(0, 1).flatten(1, 2)  # [H, R * G, d]
        products = (flat @ shared.transpose(1, 2)).unflatten(1, (len(queries), -1)).transpose(0, 1)
        own = pages[:, shared.shape[1] // PAGE :]
        if not own.shape[1]:
            return products
        tails = torch.stack([read(page_ids) for page_ids in own])
        return torch.cat((products, queries @ tails.transpose(2, 3)), -1)

    def _sketches(self, page_ids: Tensor, store: CompressedStore, layer: int) -> Tensor:
        """Sketches [H, tokens, d] of pages."""
        signs, rest, scale = (store.page[f"sketch_{name}"][layer][page_ids] for name in ("signs", "rest", "scale"))
        bits = 8 * signs.shape[-1]
        levels = 2 * plane_bits(signs, bits).float() + plane_bits(rest, bits) - 1.5
        return (levels * decode_scale(scale).unsqueeze(-1)).transpose(0, 1).flatten(1, 2)
