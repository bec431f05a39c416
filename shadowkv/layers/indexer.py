"""The indexers of block-sparse attention (MiniMax-M3, the Qwen4 preview): small queries and keys that select what
attention reads.

The cache stores the index keys. It selects blocks of tokens by the products of index queries and index keys
(``kvcache/parts/index_native.py``).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import pad

from shadowkv.kvcache.policy.shape import IndexQueries
from shadowkv.layers.norm import RMSNorm
from shadowkv.layers.spec import LayerSpec, projection


class Indexer(nn.Module):
    """Computes the index queries and the one index key of each token.

    Index queries are RMS-normalised here. So are index keys, unless the indexer is pooled: the cache then averages the
    keys of each block and normalises the mean.

    A token has one index query for each kv head, with the head dim of attention. For a pooled indexer,
    ``shape.Indexer.pooled`` gives the number and the dimensions of its index queries.
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        assert spec.indexer is not None, "the layer has no indexer"
        self.pooled = spec.indexer.pooled is not None
        self.width, self.eps = spec.heads.head_dim, spec.rms_norm_eps
        self.heads, self.dim = spec.indexer.pooled or (spec.heads.num_kv_heads, spec.heads.head_dim)
        dim = self.dim
        if self.pooled:  # checkpoints store both projections as one matrix
            rows = self.heads * dim
            self.query_key = projection(
                spec, "attention.indexer.query_key", spec.hidden_size, rows + dim, borders=(rows,)
            )
        else:
            self.query = projection(spec, "attention.indexer.query", spec.hidden_size, self.heads * dim)
            self.key = projection(spec, "attention.indexer.key", spec.hidden_size, dim)
        self.query_norm, self.key_norm = (
            RMSNorm(dim, spec.rms_norm_eps, dtype=spec.norm_dtype, device=spec.device) for _ in range(2)
        )

    def queries(self, x: Tensor) -> IndexQueries:
        """Returns the H index queries of each token, [T, H, d], before RoPE. ``x`` [T, D] has normalised hidden states.
        d is the head dim of attention. Narrower index queries are padded with zeros."""
        rows = self.heads * self.dim
        queries = self.query_key.rows(x, 0, rows) if self.pooled else self.query(x)
        queries = self._wide(self.query_norm(queries.unflatten(-1, (self.heads, -1))))
        return IndexQueries(queries, self._wide(self.key_norm.weight) if self.pooled else None, self.eps)

    def keys(self, x: Tensor) -> Tensor:
        """Returns the index key of each token, [T, 1, d], before RoPE. ``x`` [T, D] has normalised hidden states."""
        if not self.pooled:
            return self.key_norm(self.key(x).unsqueeze(1))
        first = self.heads * self.dim
        return self._wide(self.query_key.rows(x, first, first + self.dim).unsqueeze(1))

    def _wide(self, x: Tensor) -> Tensor:
        return pad(x, (0, self.width - x.shape[-1])) if x.shape[-1] < self.width else x
