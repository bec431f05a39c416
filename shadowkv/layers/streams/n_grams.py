"""N-gram embeddings (``ple`` in files of the Qwen4 preview). The newest tokens are hashed to rows of tables, and some
layers add these rows to all residual streams."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from shadowkv.kvcache.recurrent.recurrent_part import over_rounds
from shadowkv.layers.attention import Cache
from shadowkv.layers.computing import Computing
from shadowkv.layers.linear import Linear
from shadowkv.layers.norm import GroupNorm
from shadowkv.layers.spec import N_GRAM_INPUTS, N_GRAM_TOKENS, LayerSpec, NGrams
from shadowkv.layers.streams.row_table import RowTable
from shadowkv.ops.recurrence import Spans


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

        self.table = RowTable(sizes.rows, sizes.width // sizes.tables, spec.tables, spec.dtype, spec.device, spec.group)
        self.key, self.value = linear(joined), linear(self.hidden)
        self.key_norm, self.query_norm, self.value_norm = (
            GroupNorm(joined, self.streams, spec.rms_norm_eps, dtype=spec.norm_dtype, device=spec.device)
            for _ in range(3)
        )
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
        tokens = over_rounds(parts, lambda ids, spans: self._history(ids, states, spans), token_ids)
        embedded = self.table(self.rows(tokens)).flatten(1)
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
        return values + over_rounds(
            parts, lambda own, spans: self.ops.causal_convolution(own, weight, states[N_GRAM_INPUTS], spans), normed
        )

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
        kept, eos, longest = states[N_GRAM_TOKENS], self.sizes.eos_token_id, self.sizes.longest
        before = kept[spans.read].squeeze(1).long() + eos
        if spans.lengths is None:
            columns = [ids]  # newest first
            for back in range(1, longest):
                column = before[:, -back]
                # In a chain, the token before is that of the row before, whose state is not written yet.
                columns.append(torch.where(spans.follows, columns[-1].roll(1), column) if spans.chained else column)
            history = torch.stack(columns[::-1], dim=-1)
            kept[spans.write] = (history[:, 1:] - eos).unsqueeze(1).to(kept.dtype)
            return history
        found = []
        for number, own in enumerate(ids.split(spans.lengths)):
            joined = torch.cat((before[number], own))
            kept[spans.write[number : number + 1]] = (joined[1 - longest :] - eos)[None, None].to(kept.dtype)
            found.append(joined.unfold(0, longest, 1))
        return torch.cat(found)
