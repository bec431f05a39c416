"""Selection in two levels in PyTorch: first the runs with the best sign scores, then the best chunks of these runs by
all bits of the sketch.

The other runs and chunks can be sampled (MagicPIG, arXiv:2410.16179; vAttention, arXiv:2510.05688). With sampling, some
of the examined runs are drawn at random by their sign scores, and some of the selected chunks by their scores. The
weight of each sample is divided by its probability. So the sample stands for others that were not selected.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from shadowkv.ops.page import PAGE
from shadowkv.ops.sampling import Sampling, systematic_sample
from shadowkv.ops.sign_scores.reference import EXCLUDED_SCALE, RUN, decode_scale, plane_bits
from shadowkv.ops.sketch_queries.reference import SketchQueries

KEPT_SHARE = 11
"""At least one in this many runs is kept. In kept runs, all bits of the tokens' sketches are examined."""

KEPT_OVER_BUDGET = 6
"""Together, the kept runs have at least this many tokens per token of the budget."""

KEPT_LEAST = 720
"""Least number of kept runs. How well samples represent the other runs depends on the number of samples more than on
their share of the runs."""

SAMPLED_SHARE = 4
"""With sampling, one in this many kept runs is drawn at random. The others are the best runs."""

RUN_SHARPNESS = 0.5
CHUNK_SHARPNESS = 0.7
"""Factors of the logits of runs and of chunks in sampling: the probability is proportional to exp(factor * logit). Both
factors are below 1, because logits are estimates, and tokens with low logits may matter. On attention of RULER prompts,
0.3 to 0.7 for runs and 0.6 to 0.85 for chunks work equally well."""


def kept_runs(num_pages: Tensor, budget: Tensor, chunk: int) -> Tensor:
    """Number of kept runs of each row, int64 [B]. Arguments as for ``select_by_sketch``."""
    return _kept_of(PAGE // RUN * num_pages, budget * chunk).where(budget > 0, 0)


@lru_cache
def most_kept(runs: int, budget: int, chunk: int) -> int:
    """Number of kept runs of a row with ``runs`` runs that selects up to ``budget`` chunks. Cached, because it is
    called in every step with few different arguments."""
    return int(_kept_of(torch.tensor(runs), torch.tensor(budget * chunk)))


def _kept_of(runs: Tensor, tokens: Tensor) -> Tensor:
    """Number of kept runs, out of ``runs``, if ``tokens`` tokens are selected. ``csrc/sketch_rules.h`` has the same
    rule for kernels."""
    share = torch.maximum(-(-runs // KEPT_SHARE), -(-tokens * KEPT_OVER_BUDGET // RUN))
    return torch.minimum(runs, share.clamp(min=KEPT_LEAST))


def sampled_runs(num_pages: Tensor, kept: Tensor, sampling: Sampling | None) -> Tensor:
    """Returns how many of the ``kept`` runs of each row are sampled. Arguments and result are int64 [B]. The result is
    a quarter of the kept runs for rows that sample. It is 0 for other rows, and for rows that keep all runs of their
    ``num_pages`` pages.

    On attention of RULER prompts with 64 dimensions, sampling a half of the kept runs instead reduces the output's
    error by 4 %. But it misses 9.3 % of the tokens that each have at least 5 % of a head's attention. Sampling a
    quarter misses 6.1 % of these tokens, and no sampling 4.8 %.
    """
    some = torch.zeros_like(kept) if sampling is None else sampling.counts
    return torch.where((some > 0) & (kept < PAGE // RUN * num_pages), kept // SAMPLED_SHARE, 0)


def mean_length(queries: SketchQueries, heads: int) -> Tensor:
    """Returns the factor that turns sign scores into logits, float32 [B, H]. A sign score is the best one of all query
    heads of a kv head, and these heads have different factors. The result is the mean of the factors, so the logits are
    approximate."""
    return queries.length.unflatten(1, (heads, -1)).mean(-1)


def select_by_sketch(
    queries: SketchQueries,
    coarse: Tensor,
    signs: Tensor,
    rest: Tensor,
    scale: Tensor,
    pages: Tensor,
    num_pages: Tensor,
    budget: Tensor,
    chunk: int,
    k: int,
    sampling: Sampling | None = None,
    layer: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Selects the best chunks, and samples others. A chunk's logit is the largest logit of any of its tokens for any
    query of its kv head, estimated from the sketches. Queries are not scaled to length 1 here. So a long query, whose
    softmax is sharp, weighs more than a short one.

    Only ``kept_runs`` runs of 8 tokens are examined. Of these, ``sampled_runs`` are drawn at random. The others have
    the best ``coarse`` scores.

    Args:
        queries: of B sequences and H_q query heads.
        coarse: float16 [B, H, 8 P], from ``sign_scores``.
        signs, rest: uint8 [N, H, 64, S], the sketch's planes of S bytes from ``pack_sketch``, views over all N pages
            and their H kv heads.
        scale: uint8 [N, H, 64], codes of scales; 0 marks tokens that may not be selected.
        pages: int64 [B, P], page ids. Those from ``num_pages`` on may be of any page.
        num_pages: int64 [B], valid pages of each row, 0 to P.
        budget: int64 [B], number of best chunks to select. For rows that sample, it is an upper bound
            (``systematic_sample``). The best and the sampled chunks are at most ``k`` together. A row with budget 0 has
            no samples.
        chunk: tokens per chunk: 1, 2, 4 or 8. ``scale`` allows either all or none of a chunk's tokens.
        k: columns of the result.
        sampling: how many chunks to sample, and the seeds; None for no sampling.
        layer: number of the layer. Each layer uses different random numbers.

    Returns:
        Two results. The first has chunk numbers, int64 [B, H, k], ascending, then -1s. The second is None without
        ``sampling``. Otherwise, it has the logarithm of the number of chunks that each selected chunk stands for,
        float32 [B, H, k]: at least 0, and arbitrary for -1. The selection does not depend on other rows of the batch.
        The selection may differ between backends: they break ties differently, including ties of ``coarse`` scores, and
        may treat scores within a factor of 1 + 2**-10 as equal. Which chunks are sampled depends on the last bits of
        sums.
    """
    heads, device = signs.shape[1], coarse.device
    if not coarse.shape[-1]:
        none = torch.full((len(coarse), heads, k), -1, device=device)
        return none, None if sampling is None else none.float()
    whole, unit = queries.of_heads(heads)
    bits = whole.shape[-1]
    counts = torch.zeros_like(budget) if sampling is None else sampling.counts.where(budget > 0, 0)
    keep = kept_runs(num_pages, budget + counts, chunk)
    width = most_kept(coarse.shape[-1], k, chunk)

    def of_rows(x: Tensor) -> Tensor:
        """Expands [B] to [B, H]."""
        return x[:, None].expand(-1, heads)

    kept = _largest(coarse, of_rows(keep))
    if sampling is not None:
        sampled, uniform = of_rows(sampled_runs(num_pages, keep, sampling)), sampling.uniform(layer, heads)
        length = mean_length(queries, heads)
        factor = RUN_SHARPNESS / math.log(2) * length
        some, chance = systematic_sample(coarse, of_rows(keep) - sampled, of_rows(keep), factor, uniform[0])
        unsure = length * coarse.float().masked_fill(chance == 1, float("-inf")).amax(-1)
        kept, chance = some.where(sampled[..., None] > 0, kept), chance.where(sampled[..., None] > 0, 1)
        edge = unsure.where(sampled > 0, 0)
    runs = _numbers(kept, width)
    head = torch.arange(heads, device=device)[:, None]
    at_run = runs.clamp(min=0)
    page_ids = pages.gather(1, (at_run * RUN // PAGE).flatten(1)).view_as(runs)
    first = at_run * RUN % PAGE

    def of_runs(field: Tensor) -> Tensor:
        """Gathers [B, H, width, RUN, ...] from [N, H, 64, ...]: the tokens of each run."""
        return field[page_ids.unsqueeze(-1), head.unsqueeze(-1), first.unsqueeze(-1) + torch.arange(RUN, device=device)]

    codes = 2 * plane_bits(of_runs(signs), bits) + plane_bits(of_runs(rest), bits)
    levels = (codes.float() - 1.5).flatten(2, 3)  # [B, H, tokens, 8 S]
    scales = of_runs(scale).flatten(2)
    to_logit = unit * queries.length.unflatten(1, (heads, -1))
    logits = (to_logit.unsqueeze(-1) * (whole @ levels.transpose(-1, -2))).amax(2) * decode_scale(scales)
    logits = logits.masked_fill(scales == EXCLUDED_SCALE, float("-inf"))
    logits = logits.unflatten(-1, (-1, chunk)).amax(-1)  # [B, H, width * RUN / c]
    per_run = RUN // chunk
    logits = logits.masked_fill((runs < 0).repeat_interleave(per_run, dim=-1), float("-inf"))
    numbers = (runs.unsqueeze(-1) * per_run + torch.arange(per_run, device=device)).flatten(2)
    chosen = _largest(logits, of_rows(budget))
    if sampling is not None:
        chunk_weight = -chance.gather(-1, at_run).log2().repeat_interleave(per_run, dim=-1)
        counts = of_rows(counts)
        values = CHUNK_SHARPNESS / math.log(2) * (logits - edge[..., None]) + chunk_weight
        values = values.clamp(max=torch.finfo(torch.float16).max).half()
        one = torch.ones_like(edge)
        some, chance = systematic_sample(values, of_rows(budget), of_rows(budget) + counts, one, uniform[1])
        chosen, chance = some.where(counts[..., None] > 0, chosen), chance.where(counts[..., None] > 0, 1)
    at = _numbers(chosen, k)
    selected = numbers.gather(-1, at.clamp(min=0)).masked_fill(at < 0, -1)
    if sampling is None:
        return selected, None
    return selected, math.log(2) * (chunk_weight - chance.log2()).gather(-1, at.clamp(min=0))


def _largest(values: Tensor, counts: Tensor) -> Tensor:
    """Marks the largest of ``values`` [..., n], bool [..., n]. ``counts`` int64 [...] says how many. -inf is never
    marked."""
    order = values.argsort(dim=-1, descending=True, stable=True)
    within = torch.arange(values.shape[-1], device=values.device) < counts[..., None]
    return torch.zeros_like(within).scatter(-1, order, within) & ~values.isneginf()


def _numbers(chosen: Tensor, width: int) -> Tensor:
    """Indices int64 [..., width] of true entries in bool [..., n], ascending, then -1s."""
    last = chosen.shape[-1]
    numbers = torch.arange(last, device=chosen.device).where(chosen, last).sort(dim=-1).values
    numbers = torch.nn.functional.pad(numbers, (0, max(0, width - last)), value=last)[..., :width]
    return numbers.masked_fill(numbers == last, -1)
