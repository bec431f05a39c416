"""Chooses the next token of every sequence in a batch at once.

A draw depends on the request's seed and its step alone, so a seeded request gives the same text in any batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.engine.request import Request, TokenLogprobs

COLDEST = 1e-5
"""Temperatures up to this are greedy: dividing by less could overflow."""


@torch.inference_mode()
def sample(logits: Tensor, requests: list[Request]) -> tuple[list[int], list[TokenLogprobs | None], list[bool]]:
    """One token per request.

    Args:
        logits: float32 [B, V]; changed in place by penalties.
        requests: B of them.

    Returns:
        token ids; log-probabilities where asked for, of the logits before temperature and penalties; and whether a
        row's logits are all finite: the token of a row that is not has no meaning.
    """
    finite = logits.isfinite().all(-1)
    raw = logits
    penalised = [row for row, request in enumerate(requests) if request.params.repetition_penalty != 1]
    if penalised:
        raw = logits.clone()
        for row in penalised:
            _penalise(logits[row], requests[row])
    tokens = logits.argmax(-1)
    drawn = [row for row, request in enumerate(requests) if request.params.temperature > COLDEST]
    if drawn:
        tokens[drawn] = _draw(logits[drawn], [requests[row] for row in drawn])
    chosen = tokens.tolist()
    return chosen, _logprobs(raw, chosen, requests), finite.tolist()


def _penalise(logits: Tensor, request: Request) -> None:
    seen = torch.tensor(request.token_ids, dtype=torch.int64, device=logits.device).unique()
    values, penalty = logits[seen], request.params.repetition_penalty
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _draw(logits: Tensor, requests: list[Request]) -> Tensor:
    def column(name: str) -> Tensor:
        values = [float(getattr(request.params, name)) for request in requests]
        return torch.tensor(values, dtype=torch.float32, device=logits.device)[:, None]

    ordered, order = (logits / column("temperature")).sort(dim=-1, descending=True, stable=True)
    top_k = column("top_k")
    rank = torch.arange(ordered.shape[-1], device=logits.device)
    ordered = ordered.masked_fill((top_k > 0) & (rank >= top_k), float("-inf"))
    shares = ordered.softmax(-1)
    before = shares.cumsum(-1) - shares
    dropped = (before >= column("top_p")) | (shares < column("min_p") * shares[:, :1])
    dropped[:, 0] = False
    mass = shares.masked_fill(dropped, 0).nan_to_num_(0).cumsum(-1)
    uniform = torch.tensor([_uniform(request) for request in requests], dtype=torch.float32, device=logits.device)
    target = uniform[:, None] * mass[:, -1:]
    place = torch.searchsorted(mass, target, right=True).clamp(max=ordered.shape[-1] - 1)
    return order.gather(1, place).squeeze(1)


def _uniform(request: Request) -> float:
    """A number in [0, 1) from the request's seed and step (the finaliser of SplitMix64)."""
    mask = (1 << 64) - 1
    x = (request.seed + (len(request.output_token_ids) + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return ((x ^ (x >> 31)) >> 40) / (1 << 24)


def _logprobs(logits: Tensor, tokens: list[int], requests: list[Request]) -> list[TokenLogprobs | None]:
    result: list[TokenLogprobs | None] = [None] * len(requests)
    rows = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
    if rows:
        logprobs = logits[rows].log_softmax(-1)
        most = max(requests[row].params.logprobs or 0 for row in rows)
        values, ids = logprobs.topk(min(most, logits.shape[-1]), dim=-1)
        for i, row in enumerate(rows):
            count = requests[row].params.logprobs or 0
            top = dict(zip(ids[i, :count].tolist(), values[i, :count].tolist(), strict=True))
            result[row] = TokenLogprobs(tokens[row], float(logprobs[i, tokens[row]]), top)
    return result
