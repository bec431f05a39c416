"""A sketch of every key in 2 bits a dimension: it ranks tokens nearly as exact scores do, in the bytes of chunk means.

Randomly rotated coordinates are near Gaussian, so one fixed quantiser fits all keys (TurboQuant, arXiv:2504.19874).
The prompt's mean key is taken off first: it shifts the scores of all sketched tokens alike, and what is left of the
keys is coded in finer steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shadowkv.kvcache.memory import Field
from shadowkv.kvcache.parts.base import IndexPart, SealedTokens
from shadowkv.kvcache.shape import ModelShape
from shadowkv.kvcache.spec import PAGE
from shadowkv.ops.sketch_scores.reference import code_bytes, pack_sketch

if TYPE_CHECKING:
    from shadowkv.kvcache.batch import SealedBatch
    from shadowkv.kvcache.store import Store


class Sketch(IndexPart):
    @classmethod
    def unsupported(cls, shape: ModelShape) -> list[str]:
        return [f"a key sketch needs a head dim that is a multiple of 4, not {shape.head_dim}"] * (
            shape.head_dim % 4 > 0
        )

    def page_fields(self) -> tuple[Field, ...]:
        heads, width = self.shape.num_kv_heads, code_bytes(self.shape.head_dim)
        return (
            Field("sketch", (heads, self.chunks, self.spec.chunk, width), torch.uint8),
            Field("sketch_scale", (heads, PAGE), torch.float16),
        )

    def state_fields(self) -> tuple[Field, ...]:
        return (Field("sketch_mean", (self.shape.num_kv_heads, self.shape.head_dim), torch.float32),)

    def fit(self, store: Store, layer: int, slot: int, keys: Tensor, rotated: Tensor) -> None:
        store.state["sketch_mean"][layer, slot] = rotated.mean(0, dtype=torch.float32)

    def seal(self, store: Store, tokens: SealedTokens) -> None:
        mean = store.state["sketch_mean"][tokens.layers][:, tokens.slots]  # [L, n, H, d]
        codes, scale = pack_sketch(tokens.rotated - mean.unsqueeze(2), store.rotation("sketch"))
        store.write_heads("sketch", tokens.layers, tokens.pages, codes)
        store.write("sketch_scale", tokens.layers, tokens.pages, scale.transpose(2, 3))

    def logits(self, store: Store, layer: int, q: Tensor, batch: SealedBatch) -> tuple[Tensor, Tensor]:
        codes, scale, excluded = (store.page[name][layer] for name in ("sketch", "sketch_scale", "excluded"))
        return store.ops.sketch_scores(
            q, codes, scale, excluded, batch.pages, batch.num_chunks, store.rotation("sketch")
        )
