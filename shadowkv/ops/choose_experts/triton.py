"""Routing of tokens to experts in one Triton kernel, with a program per token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.choose_experts.routing import Routing


def choose_experts(logits: Tensor, correction: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Same as the reference, with experts in int32. Among equal scores the first experts are chosen. NaN ranks last."""
    (tokens, experts), k = logits.shape, routing.per_token
    logits = logits.contiguous()
    weights = logits.new_empty(tokens, k, dtype=torch.float32)
    chosen = logits.new_empty(tokens, k, dtype=torch.int32)
    if tokens:
        _choose[(tokens,)](
            logits, correction, weights, chosen, routing.scale, EXPERTS=experts, K=k,
            SIGMOID=routing.scores == "sigmoid", CORRECTED=correction is not None, NORMALISED=routing.normalised,
            GROUPS=routing.groups, GROUPS_OF_TOKEN=routing.groups_per_token,
            BLOCK=triton.next_power_of_2(experts), num_warps=1 if experts <= 256 else 4,
        )  # fmt: skip
    return weights, chosen


@triton.jit
def _choose(
    logits, correction, weights, chosen, scale,
    EXPERTS: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr, CORRECTED: tl.constexpr, NORMALISED: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_OF_TOKEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    there = expert < EXPERTS
    x = tl.load(logits + token * EXPERTS + expert, mask=there, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-x))
    else:
        powers = tl.exp(x - tl.max(x, 0))
        scores = powers / tl.sum(powers, 0)
    ranked = scores
    if CORRECTED:
        ranked += tl.load(correction + expert, mask=there, other=0.0)
    # Ranks are finite. Experts that are already chosen or do not exist get -inf, so K distinct experts are chosen.
    ranked = tl.where(ranked == ranked, tl.maximum(ranked, -3e38), -3e38)
    if GROUPS > 1:
        group = expert // (EXPERTS // GROUPS)
        best = tl.full((BLOCK,), float("-inf"), tl.float32)  # the score of each expert's group
        for g in tl.static_range(GROUPS):
            those = tl.where(there & (group == g), ranked, float("-inf"))
            highest, where = tl.max(those, 0), tl.argmax(those, 0)
            second = tl.max(tl.where(expert == where, float("-inf"), those), 0)
            best = tl.where(there & (group == g), tl.maximum(highest + second, -3e38), best)
        allowed = tl.zeros((BLOCK,), tl.int1)
        for _ in tl.static_range(GROUPS_OF_TOKEN):
            chosen_group = tl.argmax(best, 0) // (EXPERTS // GROUPS)
            allowed = allowed | (group == chosen_group)
            best = tl.where(group == chosen_group, float("-inf"), best)
        there = there & allowed
    ranked = tl.where(there, ranked, float("-inf"))
    place = tl.full((BLOCK,), K, tl.int32)
    for j in tl.static_range(K):
        best = tl.argmax(ranked, 0)
        place = tl.where(expert == best, j, place)
        ranked = tl.where(expert == best, float("-inf"), ranked)
    if NORMALISED:  # all sigmoid scores of a token may be 0
        scores = scores / tl.maximum(tl.sum(tl.where(place < K, scores, 0.0), 0), 1.1754943508222875e-38)
    tl.store(weights + token * K + place, scores * scale, mask=place < K)
    tl.store(chosen + token * K + place, expert, mask=place < K)
