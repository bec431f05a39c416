"""``Sampler``: chooses the next token of every sequence of a batch.

A step's random number depends only on the request's seed and the number of the token. So a seeded request has the same
text in every batch, as long as its logits are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from shadowkv.engine.outputs import TokenLogprobs
from shadowkv.engine.request import Request
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.kvcache.memory.streams import upload
from shadowkv.ops.registry import Ops
from shadowkv.ops.sample_tokens.weights import COLDEST, PARAMETERS
from shadowkv.ops.sampling import mix64

COLUMNS = PARAMETERS[:-1]
"""Parameters of the op ``sample_tokens`` that do not change from step to step. ``SamplingParams`` has them under the
same names."""

NO_TOKEN = -1
"""Stands for a token if a request's parameters forbid all tokens."""


class Sampler:
    """Samples tokens with the op ``sample_tokens``. Greedy batches use argmax.

    Attributes:
        calls: names of the called ops.
    """

    calls = ("sample_tokens",)

    def __init__(self, ops: Ops) -> None:
        self._sample_tokens = ops.sample_tokens
        self._params: list[SamplingParams] = []
        self._parameters = np.empty((0, len(PARAMETERS)))

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, requests: list[Request]
    ) -> tuple[list[int], list[TokenLogprobs | None], list[bool]]:
        """Chooses one token per request. Waits for the device.

        Args:
            logits: float32 [B, V], changed in place by penalties.
            requests: the B requests.

        Returns:
            Three lists with an entry per request: token ids, log-probabilities, and whether the row's logits are all
            finite. A token id is ``NO_TOKEN`` if all tokens are forbidden, and has no meaning if a logit is not finite.
            Log-probabilities are from the logits before temperature and penalties; None if not requested.
        """
        raw, finite = logits, _finite(logits)
        changed = [row for row, request in enumerate(requests) if request.params.changes_logits]
        if changed:
            raw = logits.clone()
            for row in changed:
                _change(logits[row], requests[row])
        steps = [len(request.output_token_ids) + 1 for request in requests]
        chosen = self._tokens(logits, requests, steps)
        may_follow = logits.gather(1, chosen[:, None])[:, 0] > float("-inf")
        tokens, is_finite, may = torch.stack((chosen, finite, may_follow.long())).tolist()  # one wait for the device
        logprobs = _logprobs(raw, tokens, requests)
        for row in changed:
            if is_finite[row] and not may[row]:
                tokens[row] = NO_TOKEN
        return tokens, logprobs, [bool(row) for row in is_finite]

    @torch.inference_mode()
    def choose(self, logits: Tensor, requests: list[Request], steps: list[int]) -> Tensor:
        """Chooses one token per request on the device, without waiting. Returns int64 [2, B]: the token ids, and 1 for
        each row whose logits are all finite, else 0.

        Penalties, grammars and other changes of the logits are not applied, and there are no log-probabilities.
        ``steps`` are the numbers of the requests' tokens, counted from 1.
        """
        return torch.stack((self._tokens(logits, requests, steps), _finite(logits)))

    def _tokens(self, logits: Tensor, requests: list[Request], steps: list[int]) -> Tensor:
        params = [request.params for request in requests]
        if params != self._params:  # a quick comparison: steps of the same requests have the same objects
            self._params = params
            columns = [[getattr(request_params, name) for name in COLUMNS] for request_params in params]
            self._parameters = np.array([[*row, 0.0] for row in columns]).reshape(-1, len(PARAMETERS))
        if (self._parameters[:, 0] <= COLDEST).all():
            return logits.argmax(-1)
        self._parameters[:, -1] = _random([request.seed for request in requests], steps)
        return self._sample_tokens(logits, upload(torch.from_numpy(self._parameters), logits.device))


def _finite(logits: Tensor) -> Tensor:
    low, high = logits.amin(-1), logits.amax(-1)  # NaN if any logit is NaN; aminmax takes 20 times as long on a CPU
    return (low.isfinite() & high.isfinite()).long()


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
    if params.allowed_token_ids is not None:
        if request.allowed is None:
            request.allowed = ids(params.allowed_token_ids)
        _keep(logits, request.allowed, logits[request.allowed])
    if banned := _bad_tokens(request):
        logits[ids(banned)] = float("-inf")
    if request.constraint is not None:
        request.constraint.mask(logits)
    if len(request.output_token_ids) < params.min_tokens:
        logits[ids(request.stop_ids)] = float("-inf")
    if request.thoughts is not None and (end := request.thoughts.next_token(request.output_token_ids)) is not None:
        _keep(logits, ids((end,)), 0.0)


def _keep(logits: Tensor, tokens: Tensor, values: Tensor | float) -> None:
    """Sets the logits of ``tokens`` to ``values``, and all other logits [V] to -inf."""
    logits.fill_(float("-inf"))
    logits[tokens] = values


def _bad_tokens(request: Request) -> list[int]:
    """Returns the last token of each bad word whose other tokens are the newest tokens of the answer."""
    words, output = request.bad_words, request.output_token_ids
    if not words:
        return []
    longer = words.get(output[-1], ()) if output else ()
    begun = [word[-1] for word in longer if tuple(output[1 - len(word) :]) == word[:-1]]
    return begun + [token for (token,) in words.get(None, ())]


def _random(seeds: list[int], steps: list[int]) -> np.ndarray:
    """Random numbers from 0 to 2**32 - 1, uint64 [B], from seeds and steps (SplitMix64)."""
    x = np.array([seed & (1 << 64) - 1 for seed in seeds], np.uint64)
    x += np.array(steps, np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # sums and products wrap at 64 bits
    return mix64(x) >> np.uint64(32)


def _logprobs(logits: Tensor, tokens: list[int], requests: list[Request]) -> list[TokenLogprobs | None]:
    result: list[TokenLogprobs | None] = [None] * len(requests)
    rows = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
    if rows:
        params = [requests[row].params for row in rows]
        counts = [0 if given.logprob_token_ids else given.logprobs or 0 for given in params]
        named = [given.logprob_token_ids or () for given in params]
        found = logprobs_of(logits[rows], [tokens[row] for row in rows], counts, named)
        for row, logprobs in zip(rows, found, strict=True):
            result[row] = logprobs
    return result


def logprobs_of(
    logits: Tensor, tokens: list[int], counts: list[int], named: Sequence[Sequence[int]] = ()
) -> list[TokenLogprobs]:
    """Returns the log-probabilities of ``tokens``, one token per row of ``logits`` [n, V], with alternatives.

    Args:
        counts: number of most likely tokens to report for each row; -1 is the whole vocabulary.
        named: token ids to report for each row, with the chosen token; an empty row uses ``counts``.
    """
    logprobs, vocab = logits.log_softmax(-1), logits.shape[-1]
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None]).squeeze(1).tolist()
    counts = [vocab if count == -1 else min(count, vocab) for count in counts]
    values, ids = logprobs.topk(max(counts), dim=-1)
    steps = [
        TokenLogprobs(token, value, dict(zip(row_ids[:count], row_values[:count], strict=True)))
        for token, value, count, row_ids, row_values in zip(
            tokens, chosen, counts, ids.tolist(), values.tolist(), strict=True
        )
    ]
    for row, others in enumerate(named):
        if others:
            known = logprobs[row, torch.tensor(others, device=logits.device)].tolist()
            steps[row].top.update({tokens[row]: chosen[row], **dict(zip(others, known, strict=True))})
    return steps
