"""A sketch of every key in 2 bits a dimension, searched in two levels: signs say where, the other bits decide.

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
from shadowkv.kvcache.spec import PAGE, KVSpec
from shadowkv.ops.chunk_mean_scores.reference import mask_logits
from shadowkv.ops.select_by_sketch.reference import KEPT_SHARE
from shadowkv.ops.select_top_chunks.reference import in_order
from shadowkv.ops.sign_scores.reference import RUN, plane_bytes

if TYPE_CHECKING:
    from shadowkv.kvcache.batch import SealedBatch
    from shadowkv.kvcache.store import Store


class Sketch(IndexPart):
    @classmethod
    def unsupported(cls, spec: KVSpec, shape: ModelShape) -> list[str]:
        reasons = super().unsupported(spec, shape)
        if shape.head_dim % 8:
            reasons.append(f"a key sketch needs a head dim that is a multiple of 8, not {shape.head_dim}")
        if spec.chunk > RUN:
            reasons.append(f"a key sketch finds chunks of up to {RUN} tokens, not chunk={spec.chunk}")
        return reasons

    def page_fields(self) -> tuple[Field, ...]:
        plane = (self.shape.num_kv_heads, PAGE, plane_bytes(self.shape.head_dim))
        return (
            Field("sketch_signs", plane, torch.uint8),
            Field("sketch_rest", plane, torch.uint8),
            Field("sketch_scale", plane[:2], torch.float16),
        )

    def scored_bytes_per_token(self) -> float:
        """Signs and scales of all tokens; everything of the share that is looked at closely."""
        _, rest, _ = self.page_fields()
        whole = self.bytes_per_token()
        return whole - rest.nbytes / PAGE + whole / KEPT_SHARE

    def state_fields(self) -> tuple[Field, ...]:
        return (Field("sketch_mean", (self.shape.num_kv_heads, self.shape.head_dim), torch.float32),)

    def fit(self, store: Store, layer: int, slot: int, keys: Tensor, rotated: Tensor, queries: Tensor) -> None:
        store.state["sketch_mean"][layer, slot] = rotated.mean(0, dtype=torch.float32)

    def seal(self, store: Store, tokens: SealedTokens) -> None:
        mean, rotation = store.state["sketch_mean"][tokens.layers], store.rotation("sketch")
        fields = (store.page[name][tokens.layers] for name in ("sketch_signs", "sketch_rest", "sketch_scale"))
        store.ops.sketch_keys(tokens.rotated, mean, tokens.slots, rotation, *fields, tokens.pages)

    def select(self, store: Store, layer: int, q: Tensor, batch: SealedBatch) -> Tensor:
        signs, rest, scale, excluded = (
            store.page[name][layer] for name in ("sketch_signs", "sketch_rest", "sketch_scale", "excluded")
        )
        k, places = min(batch.max_budget, batch.pages.shape[1] * self.chunks), (batch.pages, batch.num_pages)
        queries = store.ops.sketch_queries(q, store.rotation("sketch"))
        coarse = store.ops.sign_scores(queries, signs, scale, *places)
        return store.ops.select_by_sketch(queries, coarse, signs, rest, scale, excluded, *places, batch.budget, k)


class SignSketch(Sketch):
    """The first level alone, to measure what the other bits bring: runs of 8 tokens by their best signs.

    It keeps those bits without reading them.
    """

    @classmethod
    def unsupported(cls, spec: KVSpec, shape: ModelShape) -> list[str]:
        reasons = super().unsupported(spec, shape)
        if spec.chunk != RUN:
            reasons.append(f"signs alone find runs of {RUN} tokens: chunk={spec.chunk} is none")
        return reasons

    def scored_bytes_per_token(self) -> float:
        signs, _, scale = self.page_fields()
        return (signs.nbytes + scale.nbytes) / PAGE

    def select(self, store: Store, layer: int, q: Tensor, batch: SealedBatch) -> Tensor:
        signs, scale, excluded = (store.page[name][layer] for name in ("sketch_signs", "sketch_scale", "excluded"))
        queries = store.ops.sketch_queries(q, store.rotation("sketch"))
        scores = store.ops.sign_scores(queries, signs, scale, batch.pages, batch.num_pages).float().unsqueeze(2)
        scores = mask_logits(scores, excluded, batch.pages, batch.num_chunks)[0].squeeze(2)
        best, chosen = scores.topk(min(batch.max_budget, scores.shape[-1]), dim=-1)
        within = torch.arange(best.shape[-1], device=best.device) < batch.budget[:, None, None]
        return in_order(chosen, within & (best > float("-inf")))
