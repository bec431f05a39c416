"""Tokens by the scores that the mean query of the prompt would give their keys (TriAttention, arXiv:2604.04921).

Before RoPE, the queries of a head are much alike. A key's future scores can then be estimated when it is stored: by the
score of the mean query, averaged over future distances, and, as single queries are not the mean, by the key's length in
each frequency times the amount by which their mean length exceeds the length of their mean. The paper takes the mean
from 32K tokens of text; here it is that of the prompt's last queries.

The paper ranks all tokens anew every 128 steps. Here a token is ranked once, when it is compressed, for distances from
where the sequence then ends: compressed pages never change. In a segment without queries, such as one of generated
tokens, the newest tokens rank first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.memory.compressed import CompressedBatch, CompressedStore
from shadowkv.kvcache.parts.base import COMPRESSED_AT_ONCE, CompressedTokens, FittedTokens, RankedIndex
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.ops.apply_rope.reference import halves, rope_by
from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables

AHEAD = tuple(2**i for i in range(17))
"""Tokens from the end of the sequence to the queries that a key is scored for, as in the paper."""


class Trig(RankedIndex):
    def page_fields(self) -> tuple[Field, ...]:
        return (Field("trig_ranks", (self.shape.num_kv_heads, PAGE), torch.float16),)

    def state_fields(self) -> tuple[Field, ...]:
        heads, dim = (self.shape.num_kv_heads, self.shape.group), self.shape.head_dim
        return (
            Field("trig_query", (*heads, dim), torch.float32),  # after RoPE as if the segment began at position 0
            Field("trig_spread", (*heads, dim // 2), torch.float32),
            Field("trig_queries", (1,), torch.int64),  # how many were seen
            Field("trig_tokens", (2,), torch.int64),  # the first and the last position that the state is fitted on
        )

    def state_bytes_read(self) -> int:
        """The number of queries: the other fields are for keys being compressed."""
        return self.state_fields()[2].nbytes

    def observe(self, store: CompressedStore, layers: slice, states: Tensor, queries: Tensor, first: Tensor) -> None:
        count, heads, rotary = queries.shape[2], self.shape.num_kv_heads, store.rotary
        store.state["trig_queries"][layers][:, states] = count
        if not count:
            store.state["trig_query"][layers][:, states] = 0
            store.state["trig_spread"][layers][:, states] = 0
            return
        positions = first[:, None] + torch.arange(count, device=first.device)
        plain = rope(queries.float(), -positions[..., None], rotary).unflatten(3, (heads, -1))
        mean, spread = statistics(plain, rotary.config)
        store.state["trig_query"][layers][:, states] = looking_ahead(mean, rotary)
        rest = self.shape.head_dim // 2 - spread.shape[-1]
        store.state["trig_spread"][layers][:, states] = torch.nn.functional.pad(spread, (0, rest))

    def fit(self, store: CompressedStore, layers: slice, states: Tensor, tokens: FittedTokens) -> None:
        last = tokens.first + tokens.rope_keys.shape[2] - 1
        store.state["trig_tokens"][layers][:, states] = torch.stack((tokens.first, last), dim=-1)

    def compression_bytes(self) -> int:
        """Keys in float32, the terms of their scores, and the scores."""
        return 12 * COMPRESSED_AT_ONCE * PAGE * self.shape.kv_dim

    def compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        names = ("trig_query", "trig_spread", "trig_tokens")
        query, spread, fitted = (store.state[name][tokens.layers][:, tokens.states] for name in names)
        start, last = fitted.unbind(-1)
        # A generated token's page is compressed when ``local`` tokens follow it.
        now = torch.maximum(last, tokens.first + PAGE + self.spec.local - 1) - start  # [L, n]
        asked = rope(query, now[..., None, None].clamp(0, store.rotary.max_positions - 1), store.rotary)
        scores = expected_scores(asked, spread, tokens.rope_keys.transpose(2, 3).float(), store.rotary.config)
        limit = torch.finfo(torch.float16).max
        store.write("trig_ranks", tokens.layers, tokens.pages, scores.amax(3).clamp(-limit, limit).half())

    def ranks(self, store: CompressedStore, layer: int, batch: CompressedBatch) -> Tensor:
        ranks = store.page["trig_ranks"][layer][batch.pages].transpose(1, 2).flatten(2).float()
        position = torch.arange(ranks.shape[-1], device=ranks.device)
        ranks = ranks.masked_fill(position >= PAGE * batch.num_pages[:, None, None], -torch.inf)
        largest = ranks.amax(-1, keepdim=True)
        by_score = ranks - largest.masked_fill(largest == -torch.inf, 0)
        seen = store.state["trig_queries"][layer][batch.states].unsqueeze(1) > 0
        ranks = torch.where(seen, by_score, position / len(position) - 1)
        return ranks.unflatten(-1, (-1, self.spec.chunk)).amax(-1)


def rope(x: Tensor, positions: Tensor, rotary: RotaryTables) -> Tensor:
    """Rows [..., d] RoPE-rotated by positions [...], which may be negative; unlike ``apply_rope`` it changes no
    length."""
    distances, scale = positions.abs(), 1 / rotary.config.magnitude
    cos, sin = rotary.cos[distances] * scale, rotary.sin[distances] * scale
    return rope_by(x, cos, sin * positions.sign().unsqueeze(-1), rotary)


def statistics(queries: Tensor, config: RopeConfig) -> tuple[Tensor, Tensor]:
    """The mean [L, n, ..., d] of pre-RoPE queries [L, n, w, ..., d], and by frequency how much the mean of their
    lengths exceeds the length of their mean, [L, n, ..., dim / 2]."""
    mean = queries.mean(2)
    return mean, lengths(queries, config).mean(2) - lengths(mean, config)


def looking_ahead(query: Tensor, rotary: RotaryTables) -> Tensor:
    """The mean of a query [..., d] RoPE-rotated by each of ``AHEAD``."""
    angles = torch.tensor(AHEAD, dtype=torch.float64)[:, None] * rotary.config.inverse_frequencies()
    cos, sin = (x.mean(0).float().to(query.device) for x in (angles.cos(), angles.sin()))
    return rope_by(query, cos, sin, rotary)


def expected_scores(query: Tensor, spread: Tensor, keys: Tensor, config: RopeConfig) -> Tensor:
    """Expected scores of keys, in units of logits.

    Args:
        query: [..., G, d], the mean query, RoPE-rotated to where the queries will be.
        spread: [..., G, w]; each of the first dim / 2 belongs to a frequency.
        keys: [..., n, d], after RoPE.

    Returns:
        [..., G, n].
    """
    length = lengths(keys, config)
    scores = query @ keys.mT + spread[..., : length.shape[-1]] @ length.mT
    return scores * query.shape[-1] ** -0.5


def lengths(x: Tensor, config: RopeConfig) -> Tensor:
    """Lengths of the pairs in [..., d] that RoPE rotates together, [..., dim / 2]."""
    return torch.hypot(*halves(x[..., : config.dim], config))
