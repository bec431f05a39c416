"""Chooses the next token of every sequence in a batch at once.

A draw depends on the request's seed and its step alone, so a seeded request gives the same text in any batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shadowkv.engine.request import Request, TokenLogprobs

COLDEST = 1e-5
"""Temperatures up to this are greedy: dividing by less could overflow."""


@torch.inference_mode()
def sample(logits: Tensor, requests: list[Request]) -> tuple[list[int], list[TokenLogprobs | None], list[bool]]:
    """One token per request, waited for.

    Args:
        logits: float32 [B, V]; changed in place by penalties.
        requests: B of them.

    Returns:
        token ids; log-probabilities where asked for, of the logits before temperature and penalties; and whether a
        row's logits are all finite: the token of a row that is not has no meaning.
    """
    raw, finite = logits, _finite(logits)
    changed = [row for row, request in enumerate(requests) if request.params.changes_logits]
    if changed:
        raw = logits.clone()
        for row in changed:
            _change(logits[row], requests[row])
    steps = [len(request.output_token_ids) + 1 for request in requests]
    tokens, whole = torch.stack((_tokens(logits, requests, steps), finite)).tolist()  # one wait for the device
    return tokens, _logprobs(raw, tokens, requests), [bool(row) for row in whole]


@torch.inference_mode()
def choose(logits: Tensor, requests: list[Request], steps: list[int]) -> Tensor:
    """One token per request on the device, int64 [2, B]: token ids, and 1 where a row's logits are all finite.

    For requests that neither change logits nor ask for log-probabilities; ``steps`` says the how-manieth token of each
    it is.
    """
    return torch.stack((_tokens(logits, requests, steps), _finite(logits)))


def _finite(logits: Tensor) -> Tensor:
    low, high = torch.aminmax(logits, dim=-1)  # NaN where any is
    return (low.isfinite() & high.isfinite()).long()


def _tokens(logits: Tensor, requests: list[Request], steps: list[int]) -> Tensor:
    tokens = logits.argmax(-1)
    drawn = [row for row, request in enumerate(requests) if request.params.temperature > COLDEST]
    if drawn:
        tokens[drawn] = _draw(logits[drawn], [requests[row] for row in drawn], [steps[row] for row in drawn])
    return tokens


def _change(logits: Tensor, request: Request) -> None:
    params = request.params

    def ids(tokens: Iterable[int]) -> Tensor:
        return torch.tensor(list(tokens), dtype=torch.int64, device=logits.device)

    if params.repetition_penalty != 1:
        seen = ids(request.token_ids).unique()
        values, penalty = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        used, times = ids(request.output_token_ids).unique(return_counts=True)
        logits[used] -= params.presence_penalty + params.frequency_penalty * times
    if params.logit_bias:
        bias = torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        logits[ids(params.logit_bias)] += bias
    if request.constraint is not None:
        request.constraint.mask(logits)
    if len(request.output_token_ids) < params.min_tokens:
        logits[ids(request.stop_ids)] = float("-inf")


def _draw(logits: Tensor, requests: list[Request], steps: list[int]) -> Tensor:
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
    draws = [_uniform(request.seed, step) for request, step in zip(requests, steps, strict=True)]
    uniform = torch.tensor(draws, dtype=torch.float32, device=logits.device)
    target = uniform[:, None] * mass[:, -1:]
    place = torch.searchsorted(mass, target, right=True).clamp(max=ordered.shape[-1] - 1)
    return order.gather(1, place).squeeze(1)


def _uniform(seed: int, step: int) -> float:
    """A number in [0, 1) from a request's seed and step (the finaliser of SplitMix64)."""
    mask = (1 << 64) - 1
    x = (seed + step * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return ((x ^ (x >> 31)) >> 40) / (1 << 24)


def _logprobs(logits: Tensor, tokens: list[int], requests: list[Request]) -> list[TokenLogprobs | None]:
    result: list[TokenLogprobs | None] = [None] * len(requests)
    rows = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
    if rows:
        counts = [requests[row].params.logprobs or 0 for row in rows]
        for row, found in zip(rows, logprobs_of(logits[rows], [tokens[row] for row in rows], counts), strict=True):
            result[row] = found
    return result


def logprobs_of(logits: Tensor, tokens: list[int], counts: list[int]) -> list[TokenLogprobs]:
    """Log-probabilities of ``tokens``, one per row of ``logits`` [n, V], with the ``counts`` likeliest beside each."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None]).squeeze(1).tolist()
    values, ids = logprobs.topk(min(max(counts), logits.shape[-1]), dim=-1)
    return [
        TokenLogprobs(token, value, dict(zip(row_ids[:count], row_values[:count], strict=True)))
        for token, value, count, row_ids, row_values in zip(
            tokens, chosen, counts, ids.tolist(), values.tolist(), strict=True
        )
    ]
