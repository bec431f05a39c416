"""The attention layer: projections around a cache. The cache owns keys, values, positions, RoPE and softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shadowkv.kvcache.policy.shape import IndexQueries
from shadowkv.kvcache.recurrent.recurrent_part import RecurrentPart
from shadowkv.layers.indexer import Indexer
from shadowkv.layers.norm import JointNorm, RMSNorm
from shadowkv.layers.spec import LayerSpec, projection


class Cache(Protocol):
    """The cache as the attention layer calls it. ``KVCache`` implements this protocol.

    Tokens of all sequences are packed. ``batch`` says which sequence each token belongs to, and which tokens need
    attention (``of_needed``). Queries and keys arrive before RoPE and after any QK norm. Scores are scaled by
    1/sqrt(d). ``sinks``, float32 [Hq], are the query heads' scores of one more position in every softmax. The value of
    that position is 0. Layers with an indexer also pass index queries and index keys before RoPE. Shapes: T tokens, Hq
    query heads, H kv heads, d dimensions of a head.
    """

    def append(self, layer: int, k: Tensor, v: Tensor, batch: Any, index_keys: Tensor | None = None) -> None:
        """Stores the keys and the values [T, H, d] of the batch's tokens. Layers with an indexer also store the tokens'
        index keys [T, 1, d]."""

    def start(
        self, layer: int, q: Tensor, batch: Any, sinks: Tensor | None = None, index: IndexQueries | None = None
    ) -> Callable[[], Tensor]:
        """Starts causal attention of the queries ``q`` [T, Hq, d]: each query attends to its sequence up to and
        including its own token. With ``index``, a query attends to what its index queries select (``Indexer.queries``).

        The returned function finishes the attention and returns [T, Hq, d]. Between the two calls, the caller can
        launch other work, while the cache waits for values from the host.
        """
        ...

    def states(self, layer: int, batch: Any) -> tuple[dict[str, Tensor], tuple[RecurrentPart, ...]]:
        """Returns the recurrent states of a layer without attention, by name, and the parts of the batch that read and
        write these states."""
        ...


class Attention(nn.Module):
    """Projects hidden states to queries, keys and values in one product, lets the cache compute attention, and projects
    the result."""

    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    value_norm: RMSNorm | None
    sinks: nn.Parameter | None
    indexer: Indexer | None

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.indexer = Indexer(spec) if spec.indexer else None
        self.layer, self.group = spec.cached_as, spec.group
        self.num_query_heads, self.num_kv_heads, self.head_dim = spec.heads
        self.query_dim = self.num_query_heads * self.head_dim
        self.output_gate = spec.output_gate
        self.query_rows = self.query_dim * (2 if spec.output_gate else 1)
        self.reuses_keys, self.keys_are_values = spec.reuses_keys, spec.keys_are_values
        projected = 0 if spec.reuses_keys else 1 if spec.keys_are_values else 2
        self.qkv_dim = self.query_rows + projected * self.num_kv_heads * self.head_dim
        self.qkv = projection(
            spec,
            "attention.qkv",
            spec.hidden_size,
            self.qkv_dim,
            bias=spec.qkv_bias,
            borders=(self.query_rows,) if projected else (),
        )
        self.out = projection(spec, "attention.out", self.query_dim, spec.hidden_size, bias=spec.out_bias)
        eps, dtype, device = spec.rms_norm_eps, spec.norm_dtype, spec.device
        if spec.normed_heads is not None:
            heads = (self.num_query_heads, self.num_kv_heads)
            self.query_norm, self.key_norm = (
                JointNorm(here, whole, self.head_dim, eps, dtype=dtype, device=device, group=spec.group)
                for here, whole in zip(heads, spec.normed_heads, strict=True)
            )
        elif spec.qk_norm:
            self.query_norm, self.key_norm = (RMSNorm(self.head_dim, eps, dtype=dtype, device=device) for _ in range(2))
        else:
            self.query_norm = self.key_norm = None
        if spec.reuses_keys:
            self.key_norm = None
        stores_values = spec.value_norm and not spec.reuses_keys
        self.value_norm = (
            RMSNorm(self.head_dim, eps, dtype=dtype, device=device, learned=False) if stores_values else None
        )
        self.sinks = None
        if spec.sinks:
            empty = torch.empty(self.num_query_heads, dtype=torch.float32, device=spec.device)
            self.sinks = nn.Parameter(empty, requires_grad=False)

    def start(self, x: Tensor, cache: Cache, batch: Any) -> Callable[[], Tensor]:
        """Projects normalised hidden states [T, D], stores their keys and values, and starts attention. A layer that
        reuses another layer's keys and values stores none.

        The returned function finishes the attention and returns [n, D], for the n tokens whose attention the batch
        needs. D is the hidden size.
        """
        qkv = self.qkv(x)
        self._store(x, qkv[:, self.query_rows :], cache, batch)
        q, gate = qkv[:, : self.query_rows].unflatten(-1, (self.num_query_heads, -1)), None
        if self.output_gate:
            q, gate = q.chunk(2, dim=-1)
        if self.query_norm is not None:
            q = self.query_norm(q)
        index_queries = () if self.indexer is None else (self.indexer.queries(x),)
        finish = cache.start(self.layer, q, batch, self.sinks, *index_queries)
        return lambda: self._finish(finish(), gate, batch)

    def _finish(self, attended: Tensor, gate: Tensor | None, batch: Any) -> Tensor:
        """Computes the layer's output from the result of attention [T, Hq, d]."""
        attended = batch.of_needed(attended.flatten(-2))
        if gate is not None:
            attended = attended * batch.of_needed(gate.flatten(-2)).sigmoid()
        return self.group.sum(self.out(attended))

    def append(self, x: Tensor, cache: Cache, batch: Any) -> None:
        """Only stores the keys and values of normalised hidden states [T, D], without attention. Does nothing if the
        layer reuses another layer's keys and values."""
        if not self.reuses_keys:
            self._store(x, self.qkv.rows(x, self.query_rows, self.qkv_dim), cache, batch)

    def _store(self, x: Tensor, kv: Tensor, cache: Cache, batch: Any) -> None:
        if self.reuses_keys:
            return
        heads = kv.unflatten(-1, (-1, self.head_dim)).split(self.num_kv_heads, dim=1)
        k, v = heads[0], heads[-1]
        if self.key_norm is not None:
            k = self.key_norm(k)
        if self.value_norm is not None:
            v = self.value_norm(v)
        index_keys = () if self.indexer is None else (self.indexer.keys(x),)
        cache.append(self.layer, k, v, batch, *index_keys)
