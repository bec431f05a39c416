"""Low-rank keys: one subspace per sequence and layer, found by the prompt's own keys before the rotation.

ShadowKV, arXiv:2410.21465, section 4.1: keys of all kv heads joined, X [S, H*d] ~ latents [S, r] x basis [r, H*d].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shadowkv.kvcache.memory import Field
from shadowkv.kvcache.parts.base import KeyPart, SealedTokens
from shadowkv.ops.attend_selected.sources import LatentKeys

if TYPE_CHECKING:
    from shadowkv.kvcache.batch import SealedBatch
    from shadowkv.kvcache.store import Store


HEADROOM = 1.25
"""What latents of generated tokens may be larger than all of the prompt's."""


class LowRankKeys(KeyPart):
    @property
    def rank(self) -> int:
        assert self.spec.rank is not None, "the spec must be resolved"
        return self.spec.rank

    def page_fields(self) -> tuple[Field, ...]:
        return (Field("latents", (self.chunks, self.spec.chunk, self.rank), self.dtype),)

    def state_fields(self) -> tuple[Field, ...]:
        basis = Field("basis", (self.rank, self.shape.num_kv_heads, self.shape.head_dim), self.dtype)
        return (basis, Field("kept_energy", (1,), torch.float32))

    def fit(self, store: Store, layer: int, slot: int, keys: Tensor, rotated: Tensor, queries: Tensor) -> None:
        basis, kept, _ = store.ops.low_rank_basis(keys.flatten(1), self.rank)
        store.state["basis"][layer, slot] = basis.view(self.rank, *keys.shape[1:]).to(self.dtype)
        store.state["kept_energy"][layer, slot] = kept

    def seal(self, store: Store, tokens: SealedTokens) -> None:
        basis, latents = store.state["basis"][tokens.layers], store.page["latents"][tokens.layers]
        store.ops.project_latents(tokens.keys, basis, None, None, tokens.slots, latents, tokens.pages)

    def source(self, store: Store, layer: int, batch: SealedBatch) -> LatentKeys:
        latents, basis = store.page["latents"][layer], store.state["basis"][layer]
        return LatentKeys(latents, basis, None, batch.slots, batch.pages, store.rotary)


class LowRankInt8Keys(LowRankKeys):
    """Latents of centred keys in 8 bits, each dimension with its own step.

    The mean key goes first: where the projections have a bias (Qwen2) it dominates every norm. The steps are folded
    into the basis, so that a key is latents x basis + mean.
    """

    largest_code = 127

    def page_fields(self) -> tuple[Field, ...]:
        return (Field("latents", (self.chunks, self.spec.chunk, self.rank), torch.int8),)

    def state_fields(self) -> tuple[Field, ...]:
        mean = Field("key_mean", (self.shape.num_kv_heads, self.shape.head_dim), self.dtype)
        of_latents = (Field(name, (self.rank,), torch.float32) for name in ("latent_step", "latent_mean"))
        return (*super().state_fields(), mean, *of_latents)

    def fit(self, store: Store, layer: int, slot: int, keys: Tensor, rotated: Tensor, queries: Tensor) -> None:
        mean = keys.mean(0, dtype=torch.float32).to(self.dtype)
        basis, kept, largest = store.ops.low_rank_basis(keys.flatten(1), self.rank, mean.flatten())
        # The largest latent of the prompt sets the step; a later token beyond that and the headroom is clipped.
        step = HEADROOM * largest.clamp(min=1e-12) / self.largest_code
        scaled = (basis * step[:, None]).to(self.dtype)
        store.state["basis"][layer, slot] = scaled.view(self.rank, *mean.shape)
        store.state["key_mean"][layer, slot] = mean
        store.state["latent_step"][layer, slot] = step
        store.state["latent_mean"][layer, slot] = scaled.float() @ mean.flatten().float()
        store.state["kept_energy"][layer, slot] = kept

    def seal(self, store: Store, tokens: SealedTokens) -> None:
        state = (store.state[name][tokens.layers] for name in ("basis", "latent_mean", "latent_step"))
        latents = store.page["latents"][tokens.layers]
        store.ops.project_latents(tokens.keys, *state, tokens.slots, latents, tokens.pages)

    def source(self, store: Store, layer: int, batch: SealedBatch) -> LatentKeys:
        latents, state = store.page["latents"][layer], store.state
        return LatentKeys(
            latents, state["basis"][layer], state["key_mean"][layer], batch.slots, batch.pages, store.rotary
        )


class LowRankInt4Keys(LowRankInt8Keys):
    """The same in steps of 4 bits, to measure what those would cost: a latent still takes a byte."""

    largest_code = 7
