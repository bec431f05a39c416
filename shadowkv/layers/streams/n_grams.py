"""N-gram embeddings (``ple`` in files of the Qwen4 preview). The newest tokens are hashed to rows of tables, and some
layers add these rows to all residual streams."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shadowkv.kvcache.recurrent.recurrent_part import RecurrentPart
from shadowkv.layers.attention import Cache
from shadowkv.layers.computing import Computing
from shadowkv.layers.linear import Linear
from shadowkv.layers.spec import N_GRAM_INPUTS, N_GRAM_TOKENS, LayerSpec, NGrams
from shadowkv.ops.recurrence import Spans, in_order


class GroupNorm(nn.Module):
    """RMSNorm that normalises each of S streams by itself. Each of the S * D dimensions has its own weight."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        assert spec.streams is not None, "the model has one stream"
        self.count, self.eps = spec.streams.count, spec.rms_norm_eps
        size = self.count * spec.hidden_size
        self.weight = nn.Parameter(torch.empty(size, dtype=spec.norm_dtype, device=spec.device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., S * D] -> [..., S * D] in the dtype of x."""
        streams = x.float().unflatten(-1, (self.count, -1))
        normed = streams * torch.rsqrt(streams.square().mean(-1, keepdim=True) + self.eps)
        return (normed.flatten(-2) * self.weight.float()).to(x.dtype)


class NGramInput(Computing):
    """Looks up the embeddings of the n-grams that end at each token, gates them by the streams, and convolves the
    result over the newest tokens. A sequence's state has its newest tokens and the convolution's newest inputs."""

    calls = ("causal_convolution",)

    primes: Tensor
    firsts: Tensor
    multipliers: Tensor

    def __init__(self, spec: LayerSpec, sizes: NGrams) -> None:
        super().__init__()
        assert spec.streams is not None, "the model has one stream"
        self.layer, self.sizes, self.streams = spec.cached_as, sizes, spec.streams.count
        self.hidden, joined = spec.hidden_size, spec.streams.count * spec.hidden_size

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=spec.dtype, device=spec.device), requires_grad=False)

        def linear(outputs: int) -> Linear:
            return Linear(sizes.width, outputs, bias=False, dtype=spec.dtype, device=spec.device)

        self.table = empty(sizes.rows, sizes.width // sizes.tables)
        self.key, self.value = linear(joined), linear(self.hidden)
        self.key_norm, self.query_norm, self.value_norm = (GroupNorm(spec) for _ in range(3))
        self.convolution = empty(joined, 1, sizes.kernel)
        primes = sizes.primes
        self.register_buffer("primes", torch.tensor(primes, device=spec.device), persistent=False)
        firsts = [sum(primes[:number]) for number in range(len(primes))]
        self.register_buffer("firsts", torch.tensor(firsts, device=spec.device), persistent=False)
        self.register_buffer("multipliers", torch.tensor(sizes.multipliers, device=spec.device), persistent=False)

    def forward(self, x: Tensor, token_ids: Tensor, cache: Cache, batch: Any) -> Tensor:
        """Returns what is added to the streams ``x`` [T, S * D] of tokens with the ids ``token_ids``, int64 [T].
        Updates the states."""
        states, parts = cache.states(self.layer, batch)
        tokens, start = [], 0
        for part in parts:
            rows = slice(start, start := start + part.num_tokens)
            tokens.append(_by_rounds(token_ids[rows], part, lambda ids, spans: self._history(ids, states, spans)))
        embedded = F.embedding(self.rows(torch.cat(tokens)), self.table).flatten(1)
        keys = self.key_norm(self.key(embedded)).unflatten(-1, (self.streams, -1))
        queries = self.query_norm(x).unflatten(-1, (self.streams, -1))
        gate = (keys * queries).sum(-1, keepdim=True) / math.sqrt(self.hidden)
        gate = gate.abs().clamp_min(1e-6).sqrt() * gate.sign()
        values = (gate.sigmoid() * self.value(embedded).unsqueeze(-2)).flatten(-2)
        normed = self.value_norm(values)
        # The dilated convolution is computed as a wider convolution with zeros between the weights.
        step, kernel = self.sizes.longest, self.sizes.kernel
        weight = normed.new_zeros(len(self.convolution), (kernel - 1) * step + 1)
        weight[:, ::step] = self.convolution.squeeze(1)
        outs, start = [], 0
        for part in parts:
            rows = slice(start, start := start + part.num_tokens)
            outs.append(
                _by_rounds(
                    normed[rows],
                    part,
                    lambda own, spans: self.ops.causal_convolution(own, weight, states[N_GRAM_INPUTS], spans),
                )
            )
        return values + torch.cat(outs)

    def rows(self, tokens: Tensor) -> Tensor:
        """Returns the numbers of the table's rows to look up for each of T tokens, int64 [T, tables]. ``tokens``
        [T, longest] is as ``_history`` returns it."""
        eos = self.sizes.eos_token_id
        mixed, seen_eos, hashed = tokens[:, -1] * self.multipliers[0], torch.zeros_like(tokens[:, -1]).bool(), []
        for back in range(1, self.sizes.longest):
            token = tokens[:, -1 - back]
            seen_eos = seen_eos | (token == eos)  # nothing before the end of a text is read
            mixed = mixed ^ (torch.where(seen_eos, eos, token) * self.multipliers[back])
            hashed.append(mixed.unsqueeze(-1).expand(-1, self.sizes.tables_each))
        return torch.cat(hashed, dim=-1) % self.primes + self.firsts

    def _history(self, ids: Tensor, states: dict[str, Tensor], spans: Spans) -> Tensor:
        """Returns the ids of the ``longest`` tokens that end with each of T tokens, int64 [T, longest], newest last.
        Updates the state.

        The state has token ids minus ``eos_token_id``. So the state's initial value, 0, stands for the end of a text.
        """
        if spans.chained:
            return in_order(lambda token, span: self._history(token, states, span), spans, ids)
        kept, eos, longest = states[N_GRAM_TOKENS], self.sizes.eos_token_id, self.sizes.longest
        before = kept[spans.read].squeeze(1).long() + eos
        if spans.lengths is None:
            history = torch.cat((before, ids.unsqueeze(-1)), dim=-1)
            kept[spans.write] = (history[:, 1:] - eos).unsqueeze(1).to(kept.dtype)
            return history
        found = []
        for number, own in enumerate(ids.split(spans.lengths)):
            joined = torch.cat((before[number], own))
            kept[spans.write[number : number + 1]] = (joined[1 - longest :] - eos)[None, None].to(kept.dtype)
            found.append(joined.unfold(0, longest, 1))
        return torch.cat(found)


def _by_rounds(x: Tensor, part: RecurrentPart, compute: Any) -> Tensor:
    """Calls ``compute`` for the rows and the spans of each round (``RecurrentPart.rounds``). Returns the results of all
    tokens of the part, in order."""
    (rows, spans), *others = part.rounds
    first = compute(x if rows is None else x[rows], spans)
    if rows is None:
        return first
    out = first.new_empty(len(x), *first.shape[1:]).index_copy_(0, rows, first)
    for rows, spans in others:
        out.index_copy_(0, rows, compute(x[rows], spans))
    return out
