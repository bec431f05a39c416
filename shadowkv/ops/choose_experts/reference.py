"""Routing of tokens to experts in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.choose_experts.routing import Routing

BEST_OF_GROUP = 2
"""A group's score is the sum of the scores of its best experts. This is the number of experts in the sum."""


def choose_experts(logits: Tensor, correction: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Chooses k of E experts for each of T tokens, and computes their weights.

    Args:
        logits: [T, E].
        correction: float32 [E], added to scores when experts are chosen. None unless ``Routing.corrected``.
        routing: the model's rule.

    Returns:
        weights, float32 [T, k]; experts, int64 [T, k].
    """
    scores = logits.float().sigmoid() if routing.scores == "sigmoid" else logits.softmax(-1, dtype=torch.float32)
    ranked = scores if correction is None else scores + correction
    if routing.groups > 1:
        grouped = ranked.unflatten(-1, (routing.groups, -1))
        best = grouped.topk(BEST_OF_GROUP, -1).values.sum(-1).topk(routing.groups_per_token, -1).indices
        allowed = torch.zeros(grouped.shape[:-1], dtype=torch.bool, device=logits.device).scatter_(-1, best, True)
        ranked = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(-2)
    experts = ranked.topk(routing.per_token, -1).indices
    weights = scores.gather(-1, experts)
    if routing.normalised:  # all sigmoid scores of a token may be 0
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return weights * routing.scale, experts
