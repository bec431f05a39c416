"""An index that selects the tokens to which the prompt's last queries attend (SnapKV, arXiv:2404.14469). The ranking is
the same at every step.

The voters are the prompt's last 64 queries (64 is the default of the published code). Earlier tokens of the prompt rank
by the voters' attention to them, averaged over the voters of all query heads of a kv head. A token's score is the
largest attention in a window of 7 tokens around it (as in the paper's LongBench runs). The paper never drops the
voters' own tokens or later ones (generated, or of a later turn). Here these tokens rank above all scored tokens, the
newest first, and use the same budget. A segment of generated tokens has no voters; its newest tokens rank first.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache import parts, presets
from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.memory.compressed import CompressedBatch, CompressedStore
from shadowkv.kvcache.parts.base import COMPRESSED_AT_ONCE, OBSERVED, CompressedTokens, FittedTokens, RankedIndex
from shadowkv.kvcache.policy.spec import PAGE, KVSpec

NEIGHBOURS = 7
"""Size of the window around a token, in tokens. The token's score is the vote of the most attended token in the
window."""

LEAST = 1e-37
"""Lower bound of votes. It makes their logarithms finite in float32."""


class Votes(RankedIndex):
    def page_fields(self) -> tuple[Field, ...]:
        return (Field("votes", (self.shape.num_kv_heads, PAGE), torch.float32),)

    def state_fields(self) -> tuple[Field, ...]:
        heads, voters = self.shape.num_kv_heads, OBSERVED * self.shape.group
        return (
            Field("vote_queries", (heads, voters, self.shape.head_dim), self.dtype),
            Field("vote_lse", (heads, voters), torch.float32),
            Field("voters", (1,), torch.int64),
            Field("voted", (1,), torch.int64),  # number of tokens before the voters
        )

    def observe(self, store: CompressedStore, layers: slice, states: Tensor, queries: Tensor, first: Tensor) -> None:
        count = queries.shape[2]
        padded = queries.new_zeros(*queries.shape[:2], OBSERVED, *queries.shape[3:])
        padded[:, :, :count] = queries
        grouped = padded.transpose(2, 3).unflatten(2, (self.shape.num_kv_heads, -1))  # [layers, segments, H, G, 64, d]
        store.state["vote_queries"][layers][:, states] = grouped.flatten(3, 4)
        store.state["voters"][layers][:, states] = count
        store.state["voted"][layers][:, states] = first[:, None] if count else 0

    def fitting_bytes(self, tokens: int) -> int:
        """One head's keys in float32, and the voters' scores, unmasked and masked, in one layer."""
        return 4 * tokens * (self.shape.head_dim + 3 * OBSERVED * self.shape.group)

    def compression_bytes(self) -> int:
        """Keys in float32, and for all voters: the scores, the scores minus the log-sum-exps, and the attention
        weights."""
        of_head = 8 * self.shape.head_dim + 12 * OBSERVED * self.shape.group
        return COMPRESSED_AT_ONCE * PAGE * self.shape.num_kv_heads * of_head

    def fit(self, store: CompressedStore, layers: slice, states: Tensor, tokens: FittedTokens) -> None:
        names = ("vote_queries", "vote_lse", "voted", "voters")
        queries, sums, before, voters = (store.state[name][layers][:, states] for name in names)
        number = torch.arange(OBSERVED, device=states.device).repeat(self.shape.group)
        token = torch.arange(tokens.rope_keys.shape[2], device=states.device)
        for segment in np.ndindex(*tokens.rope_keys.shape[:2]):
            later = token > (before[segment] + number)[:, None]
            for head in range(self.shape.num_kv_heads):
                scores = self._scores(queries[segment][head], tokens.rope_keys[segment][:, head])
                lse = scores.masked_fill(later, -math.inf).logsumexp(-1)
                # A missing voter has an infinite log-sum-exp, so its attention to every key is 0.
                sums[segment][head] = torch.where(number < voters[segment], lse, math.inf)
        store.state["vote_lse"][layers][:, states] = sums

    def compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        voters, lse = (store.state[name][tokens.layers][:, tokens.states] for name in ("vote_queries", "vote_lse"))
        scores = self._scores(voters, tokens.rope_keys.transpose(2, 3))  # [layers, pages, H, G * 64 voters, 64 tokens]
        store.write("votes", tokens.layers, tokens.pages, (scores - lse.unsqueeze(-1)).exp().mean(3))

    def ranks(self, store: CompressedStore, layer: int, batch: CompressedBatch) -> Tensor:
        votes = store.page["votes"][layer][batch.pages].transpose(1, 2).flatten(2)
        position = torch.arange(votes.shape[-1], device=votes.device)
        scored = position < torch.minimum(store.state["voted"][layer][batch.states], PAGE * batch.num_pages[:, None])
        votes = votes.masked_fill(~scored.unsqueeze(1), 0.0)
        pooled = torch.nn.functional.max_pool1d(votes, NEIGHBOURS, stride=1, padding=NEIGHBOURS // 2)
        # Votes are at most 1, so their logarithms minus 1 are below all ranks by age, which are between -1 and 0.
        by_vote, by_age = pooled.clamp(min=LEAST).log() - 1, position / len(position) - 1
        ranks = torch.where(scored.unsqueeze(1), by_vote, by_age)
        return ranks.unflatten(-1, (-1, self.spec.chunk)).amax(-1)

    def _scores(self, voters: Tensor, keys: Tensor) -> Tensor:
        return voters.float() @ keys.float().transpose(-1, -2) * self.shape.head_dim**-0.5


def register() -> None:
    """Registers the index and the preset. The paper has budgets of 1024 to 4096."""
    parts.register("index", "votes", Votes)
    presets.register("snapkv", KVSpec(index="votes", chunk=1))
