"""An index that scores all tokens by the first principal components of their keys (Loki, arXiv:2406.02542).

The paper finds the components offline, from the keys of a calibration text, and stores all keys in the basis of these
components. Here the components come from each sequence's own prompt, per layer and kv head, after RoPE. Keys are stored
as the policy says, and the projected keys are stored in addition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.kvcache import parts, presets
from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.memory.compressed import CompressedBatch, CompressedStore
from shadowkv.kvcache.parts.base import COMPRESSED_AT_ONCE, EXCLUDED, CompressedTokens, FittedTokens, ScoredIndex
from shadowkv.kvcache.parts.scores import projected_scores
from shadowkv.kvcache.policy.spec import PAGE, KVSpec


class PCA(ScoredIndex):
    kept = 1 / 4
    """Share of the components that scores use: the paper's d_f."""

    @property
    def width(self) -> int:
        return round(self.kept * self.shape.head_dim)

    def page_fields(self) -> tuple[Field, ...]:
        shape = (self.shape.num_kv_heads, self.chunks, self.spec.chunk, self.width)
        return (Field("pca_keys", shape, self.dtype),)

    def state_fields(self) -> tuple[Field, ...]:
        heads, dim = self.shape.num_kv_heads, self.shape.head_dim
        return (
            Field("pca_mean", (heads, dim), torch.float32),
            Field("pca_basis", (heads, dim, self.width), torch.float32),
        )

    def fitting_bytes(self, tokens: int) -> int:
        """One head's keys in float32, and their centred copy."""
        return 2 * 4 * tokens * self.shape.head_dim

    def compression_bytes(self) -> int:
        """Keys in float32, centred keys, and projected keys."""
        return 12 * COMPRESSED_AT_ONCE * PAGE * self.shape.kv_dim

    def fit(self, store: CompressedStore, layers: slice, states: Tensor, tokens: FittedTokens) -> None:
        mean = tokens.rope_keys.mean(2, dtype=torch.float32)
        for head in range(self.shape.num_kv_heads):
            centred = tokens.rope_keys[:, :, :, head].float() - mean[:, :, None, head]
            # eigh raises an error for infinite or NaN entries, and the error would fail every sequence of the batch. So
            # these entries become 0 here. A sequence whose keys overflowed also gets non-finite logits, and these are
            # reported for this sequence alone.
            covariance = (centred.transpose(2, 3) @ centred).nan_to_num_(0.0, 0.0, 0.0)
            components = torch.linalg.eigh(covariance).eigenvectors  # in order of ascending variance
            store.state["pca_basis"][layers, :, head][:, states] = components[..., -self.width :]
        store.state["pca_mean"][layers][:, states] = mean

    def compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        mean, basis = (store.state[name][tokens.layers][:, tokens.states] for name in ("pca_mean", "pca_basis"))
        # Subtracting the mean changes a query's scores of all tokens by the same number, so their order stays. It makes
        # rounding errors smaller.
        centred = (tokens.rope_keys.float() - mean.unsqueeze(2)).transpose(2, 3)
        projected = (centred @ basis).transpose(2, 3).to(self.dtype)  # [layers, pages, 64, H, width]
        store.write_heads("pca_keys", tokens.layers, tokens.pages, projected)

    def logits(self, store: CompressedStore, layer: int, q: Tensor, batch: CompressedBatch) -> tuple[Tensor, Tensor]:
        fields = store.state["pca_basis"][layer], store.page["pca_keys"][layer], store.page[EXCLUDED][layer]
        return projected_scores(q, *fields, batch)


def register() -> None:
    """Registers the index and the preset. The paper's k_f, the share of the tokens that a step selects, is 0.25:
    ``budget=0.25``."""
    parts.register("index", "pca", PCA)
    presets.register("loki", KVSpec(index="pca", chunk=1))
