"""An index with a sketch of every key, 2 bits per dimension (``turbo``). The sketches are searched in two levels: the
sign bits choose runs of 8 tokens, and all bits choose chunks in the best runs.

After a random rotation, coordinates are nearly Gaussian, so one fixed quantizer fits all keys (TurboQuant,
arXiv:2504.19874). The prompt's mean key is subtracted first: it shifts the scores of all tokens equally, so it is not
needed, and what remains of the keys is coded in finer steps. Before the rotation R, keys are multiplied by a root L of
the second moments of the prompt's last queries, and queries by the transposed inverse of L. Products of keys and
queries stay the same, but the sketch's error is smaller in directions that queries weight more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.memory.compressed import CompressedBatch, CompressedStore
from shadowkv.kvcache.parts.base import EXCLUDED, CompressedTokens, FittedTokens, IndexPart, Selection
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import PAGE, KVSpec
from shadowkv.ops.chunk_scores.reference import mask_logits
from shadowkv.ops.registry import Ops
from shadowkv.ops.select_by_sketch.reference import most_kept
from shadowkv.ops.select_top_chunks.reference import in_order
from shadowkv.ops.sign_scores.reference import EXCLUDED_SCALE, RUN
from shadowkv.ops.sketch_queries.reference import plane_bytes
from shadowkv.settings import Check, setting

ISOTROPIC = 0.85
"""Share of the identity matrix that is mixed into the second moments, because future queries differ from the observed
ones. With 0.85, the runs that the sign bits choose miss 0.6 to 1.3 % of the tokens that have at least 3 % of a head's
attention, on RULER prompts of 16K and 32K tokens. They miss 2 % with the identity alone, and up to 5 % with a share of
0.3."""


class KeySketch(IndexPart):
    """Base class of ``Sketch`` and ``SignSketch``: stores the sketches of keys."""

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
            Field("sketch_scale", plane[:2], torch.uint8),
        )

    def state_fields(self) -> tuple[Field, ...]:
        heads, dim = self.shape.num_kv_heads, self.shape.head_dim
        return (
            Field("sketch_mean", (heads, dim), torch.float32),
            Field("sketch_key_map", (heads, dim, dim), torch.bfloat16),
            Field("sketch_query_map", (heads, dim, dim), torch.bfloat16),
        )

    def state_bytes_read(self) -> int:
        """Bytes of the map of queries, the only field that a decode step reads. The other fields are read when tokens
        are compressed."""
        return self.state_fields()[-1].nbytes

    def captures_observe(self, ops: Ops) -> bool:
        return "whiten_rows" not in ops.not_in_graphs

    def observe(self, store: CompressedStore, layers: slice, states: Tensor, queries: Tensor, first: Tensor) -> None:
        maps = sketch_maps(queries, self.shape.num_kv_heads, store.rotation("sketch"), store.ops)
        for name, map_of_heads in zip(("sketch_key_map", "sketch_query_map"), maps, strict=True):
            store.state[name][layers][:, states] = map_of_heads.to(torch.bfloat16)

    def fit(self, store: CompressedStore, layers: slice, states: Tensor, tokens: FittedTokens) -> None:
        store.state["sketch_mean"][layers][:, states] = tokens.rope_keys.mean(2, dtype=torch.float32)

    def compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        mean, maps = (store.state[name][tokens.layers] for name in ("sketch_mean", "sketch_key_map"))
        names = ("sketch_signs", "sketch_rest", "sketch_scale")
        signs, rest, scale = (store.page[name][tokens.layers] for name in names)
        store.ops.sketch_keys(tokens.rope_keys, mean, maps, tokens.states, signs, rest, scale, tokens.pages)

    def exclude(self, store: CompressedStore, layers: slice, pages: Tensor, excluded: Tensor) -> None:
        scale = store.page["sketch_scale"][layers, pages]
        marked = excluded.repeat_interleave(self.spec.chunk, dim=-1)
        store.write("sketch_scale", layers, pages, scale.masked_fill(marked, EXCLUDED_SCALE))


class Sketch(KeySketch):
    unstored = ("sampled",)
    reads_excluded = False
    ops = ("whiten_rows", "sketch_keys", "sketch_queries", "sign_scores", "select_by_sketch")

    @dataclass(frozen=True)
    class Settings:
        """Chunks outside the top-k are sampled, with probabilities that follow from the index's scores. A sampled chunk
        also stands for chunks that were not sampled: the lower its probability, the more chunks it stands for. So
        thinly spread attention is not lost (MagicPIG, arXiv:2410.16179; vAttention, arXiv:2510.05688)."""

        sampled: float = setting(
            0.0,
            "index",
            "share of the budget for chunks that are sampled by their scores, and stand for those outside the top-k",
            check=Check(lambda sampled: 0 <= sampled < 1, "must be in [0, 1)"),
        )

    @classmethod
    def described(cls, spec: KVSpec, shape: ModelShape) -> str:
        sampled = cls.settings_of(spec).sampled
        return f"{sampled:.0%} of the budget sampled" if sampled else ""

    @property
    def sampled(self) -> float:
        sampled: float = self.settings.sampled
        return sampled

    @classmethod
    def unsupported(cls, spec: KVSpec, shape: ModelShape) -> list[str]:
        reasons = super().unsupported(spec, shape)
        if cls.settings_of(spec).sampled and spec.place == "host":
            reasons.append("every step samples other chunks, so values must be on the device, not the host")
        return reasons

    def scored_bytes(self, tokens: int, chunks: int) -> float:
        """Bytes of the signs and scales of all tokens, and all bytes of the best runs."""
        signs, _, scale = self.page_fields()
        in_best_runs = RUN * most_kept(tokens // RUN, chunks, self.spec.chunk)
        return tokens * (signs.nbytes + scale.nbytes) / PAGE + in_best_runs * self.bytes_per_token()

    def select(self, store: CompressedStore, layer: int, q: Tensor, batch: CompressedBatch) -> Selection:
        signs, rest, scale = (store.page[name][layer] for name in ("sketch_signs", "sketch_rest", "sketch_scale"))
        number = store.layers[layer]  # each layer samples independently
        k, compressed = min(batch.max_budget, batch.pages.shape[1] * self.chunks), (batch.pages, batch.num_pages)
        queries = store.ops.sketch_queries(q, store.state["sketch_query_map"][layer], batch.states)
        coarse = store.ops.sign_scores(queries, signs, scale, *compressed)
        return Selection(
            *store.ops.select_by_sketch(
                queries,
                coarse,
                signs,
                rest,
                scale,
                *compressed,
                batch.budget,
                self.spec.chunk,
                k,
                batch.sampling,
                number,
            )
        )


class SignSketch(KeySketch):
    """An index that has the first level alone: it selects runs of 8 tokens by their sign scores. The other bits are
    stored but not read, so a comparison with ``Sketch`` measures the benefit of the second level."""

    ops = ("whiten_rows", "sketch_keys", "sketch_queries", "sign_scores")

    @classmethod
    def unsupported(cls, spec: KVSpec, shape: ModelShape) -> list[str]:
        reasons = super().unsupported(spec, shape)
        if spec.chunk != RUN:
            reasons.append(f"signs alone select runs of {RUN} tokens: they need chunk={RUN}, not {spec.chunk}")
        return reasons

    def scored_bytes(self, tokens: int, chunks: int) -> float:
        signs, _, scale = self.page_fields()
        return tokens * (signs.nbytes + scale.nbytes) / PAGE

    def select(self, store: CompressedStore, layer: int, q: Tensor, batch: CompressedBatch) -> Selection:
        signs, scale, excluded = (store.page[name][layer] for name in ("sketch_signs", "sketch_scale", EXCLUDED))
        queries = store.ops.sketch_queries(q, store.state["sketch_query_map"][layer], batch.states)
        scores = store.ops.sign_scores(queries, signs, scale, batch.pages, batch.num_pages).float().unsqueeze(2)
        scores = mask_logits(scores, excluded, batch.pages, batch.num_chunks)[0].squeeze(2)
        best, chosen = scores.topk(min(batch.max_budget, scores.shape[-1]), dim=-1)
        within = torch.arange(best.shape[-1], device=best.device) < batch.budget[:, None, None]
        return Selection(in_order(chosen, within & (best > float("-inf"))))


def sketch_maps(queries: Tensor, heads: int, rotation: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
    """The maps of each kv head's keys and queries: L R for keys, and L^-T R for queries.

    L L^T = d C, where C is the second moment of normalised queries, mixed with the second moment of uniform directions.

    Args:
        queries: [..., w, H_q, d], the last w queries of a prompt; w can be 0.
        heads: H.
        rotation: float32 [d, d], orthogonal.

    Returns:
        Two maps, float32 [..., H, d, d]. They preserve products: the first times the transposed second is the identity.
    """
    dim = rotation.shape[0]
    identity = torch.eye(dim, device=rotation.device)
    moments = identity.expand(*queries.shape[:-3], heads, dim, dim)
    if queries.shape[-3]:
        grouped = torch.nn.functional.normalize(queries.float(), dim=-1).unflatten(-2, (heads, -1))
        units = grouped.transpose(-4, -3).flatten(-3, -2)  # [..., H, w G, d]
        moments = ISOTROPIC * identity + (1 - ISOTROPIC) * dim / units.shape[-2] * (units.mT @ units)
    # The root exists: the smallest eigenvalue is at least ISOTROPIC. L R is computed as L L^T (L^-T R).
    flat = moments.flatten(0, -3).contiguous()
    inverse = ops.whiten_rows(identity.expand_as(flat).contiguous(), flat).view(moments.shape)
    of_queries = inverse.mT @ rotation
    return moments @ of_queries, of_queries
