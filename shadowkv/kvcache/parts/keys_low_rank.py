"""Low-rank keys: one subspace per sequence and layer, found by the prompt's own keys before the rotation.

ShadowKV, arXiv:2410.21465, section 4.1: keys of all kv heads joined, X [S, H*d] ~ latents [S, r] x basis [r, H*d].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shadowkv.kvcache.memory import Field
from shadowkv.kvcache.parts.base import KeyPart, SealedTokens

if TYPE_CHECKING:
    from shadowkv.kvcache.batch import SealedBatch
    from shadowkv.kvcache.store import Store


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

    def fit(self, store: Store, layer: int, slot: int, keys: Tensor) -> None:
        basis, kept = store.ops.low_rank_basis(keys.flatten(1), self.rank)
        store.state["basis"][layer, slot] = basis.view(self.rank, *keys.shape[1:]).to(self.dtype)
        store.state["kept_energy"][layer, slot] = kept

    def seal(self, store: Store, layer: int, tokens: SealedTokens) -> None:
        basis = store.state["basis"][layer][tokens.slots].flatten(2)
        latents = tokens.keys.flatten(2) @ basis.transpose(1, 2)
        store.page["latents"][layer][tokens.pages] = latents.unflatten(1, (self.chunks, self.spec.chunk))

    def gather(self, store: Store, layer: int, batch: SealedBatch, selected: Tensor) -> Tensor:
        return store.ops.rebuild_keys(
            store.page["latents"][layer], store.state["basis"][layer], batch.slots, batch.pages, selected, store.rotary
        )
