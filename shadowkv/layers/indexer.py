"""The indexer of block-sparse attention (MiniMax-M3): small queries and keys that select what attention reads.

The cache stores the index keys, and selects blocks of tokens by products of both (``kvcache/parts/index_native.py``).
"""

from __future__ import annotations

from torch import Tensor, nn

from shadowkv.layers.norm import RMSNorm
from shadowkv.layers.spec import LayerSpec, projection


class Indexer(nn.Module):
    """One index query for each kv head and one index key for each token, RMS-normalised, with the head dim of
    attention."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.heads, dim = spec.heads.num_kv_heads, spec.heads.head_dim
        self.query = projection(spec, "attention.indexer.query", spec.hidden_size, self.heads * dim)
        self.key = projection(spec, "attention.indexer.key", spec.hidden_size, dim)
        self.query_norm, self.key_norm = (
            RMSNorm(dim, spec.rms_norm_eps, dtype=spec.norm_dtype, device=spec.device) for _ in range(2)
        )

    def queries(self, x: Tensor) -> Tensor:
        """Index queries [T, H, d] before RoPE, of normalised hidden states [T, D]."""
        return self.query_norm(self.query(x).unflatten(-1, (self.heads, -1)))

    def keys(self, x: Tensor) -> Tensor:
        """Index keys [T, 1, d] before RoPE, of normalised hidden states [T, D]."""
        return self.key_norm(self.key(x).unsqueeze(1))
