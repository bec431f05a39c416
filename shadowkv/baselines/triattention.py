"""An index that ranks tokens by estimated future scores of their keys (TriAttention, arXiv:2604.04921).

Before RoPE, the queries of a head are similar. So a key's future scores can be estimated when the key is stored. The
estimate has two terms. The first is the score of the mean query, averaged over future distances. The second accounts
for queries that differ from the mean. It is a sum over the frequencies of RoPE, each of which rotates a pair of
coordinates. A frequency adds the length of the key's pair, times the difference between the mean length of the queries'
pairs and the length of their mean. The paper takes these statistics from 32K tokens of text; here they come from the
prompt's last queries.

The paper ranks all tokens again every 128 steps. Here a token is ranked once, when it is compressed, because compressed
pages never change. Distances then count from the end that the sequence has at that time. A segment of generated tokens
has no queries; its newest tokens rank first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.kvcache import parts, presets
from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.memory.compressed import CompressedBatch, CompressedStore
from shadowkv.kvcache.parts.base import COMPRESSED_AT_ONCE, CompressedTokens, FittedTokens, RankedIndex
from shadowkv.kvcache.policy.spec import PAGE, KVSpec
from shadowkv.ops.apply_rope.reference import halves, rope_by
from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables

AHEAD = tuple(2**i for i in range(17))
"""Distances of future queries from the end of the sequence, in tokens, as in the paper. A key's score is the mean over
these distances."""


class Trig(RankedIndex):
    def page_fields(self) -> tuple[Field, ...]:
        return (Field("trig_ranks", (self.shape.num_kv_heads, PAGE), torch.float16),)

    def state_fields(self) -> tuple[Field, ...]:
        heads, dim = (self.shape.num_kv_heads, self.shape.group), self.shape.head_dim
        return (
            Field("trig_query", (*heads, dim), torch.float32),  # mean query, as if at the segment's start
            Field("trig_spread", (*heads, dim // 2), torch.float32),
            Field("trig_queries", (1,), torch.int64),  # number of observed queries
            Field("trig_tokens", (2,), torch.int64),  # first and last position of the fitted tokens
        )

    def state_bytes_read(self) -> int:
        """Bytes of the number of queries, the only field that a decode step reads. The other fields are read when
        tokens are compressed."""
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
        """Keys in float32, the terms of the scores, and the scores."""
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
    """Applies RoPE to rows [..., d] at positions [...], which can be negative. Unlike ``apply_rope``, this function
    does not multiply by the magnitude of the RoPE config, so lengths stay the same."""
    distances, scale = positions.abs(), 1 / rotary.config.magnitude
    cos, sin = rotary.cos[distances] * scale, rotary.sin[distances] * scale
    return rope_by(x, cos, sin * positions.sign().unsqueeze(-1), rotary)


def statistics(queries: Tensor, config: RopeConfig) -> tuple[Tensor, Tensor]:
    """Returns the mean [L, n, ..., d] of w queries before RoPE [L, n, w, ..., d], for L layers and n segments. Also
    returns, for each frequency, the queries' mean length minus the length of their mean, [L, n, ..., r / 2], where r =
    ``config.dim`` is the number of dimensions that RoPE rotates."""
    mean = queries.mean(2)
    return mean, lengths(queries, config).mean(2) - lengths(mean, config)


def looking_ahead(query: Tensor, rotary: RotaryTables) -> Tensor:
    """Rotates a query [..., d] ahead by each distance of ``AHEAD``, as RoPE does. Returns the mean of the rotated
    queries, [..., d]."""
    angles = torch.tensor(AHEAD, dtype=torch.float64)[:, None] * rotary.config.inverse_frequencies()
    cos, sin = (x.mean(0).float().to(query.device) for x in (angles.cos(), angles.sin()))
    return rope_by(query, cos, sin, rotary)


def expected_scores(query: Tensor, spread: Tensor, keys: Tensor, config: RopeConfig) -> Tensor:
    """Estimates the future scores of keys, in units of logits.

    Args:
        query: [..., G, d], the mean query of each of G query heads, rotated by RoPE to future positions.
        spread: [..., G, w], the length differences of ``statistics``; only the first r / 2 are used, where r =
            ``config.dim`` is the number of dimensions that RoPE rotates.
        keys: [..., n, d], the n keys of a kv head, after RoPE.

    Returns:
        [..., G, n].
    """
    length = lengths(keys, config)
    scores = query @ keys.mT + spread[..., : length.shape[-1]] @ length.mT
    return scores * query.shape[-1] ** -0.5


def lengths(x: Tensor, config: RopeConfig) -> Tensor:
    """Lengths [..., r / 2] of the pairs of coordinates in [..., d] that RoPE rotates together. r = ``config.dim`` is
    the number of rotated dimensions."""
    return torch.hypot(*halves(x[..., : config.dim], config))


def register() -> None:
    """Registers the index and the preset."""
    parts.register("index", "trig", Trig)
    presets.register("triattention", KVSpec(index="trig", chunk=1))
