"""Attention layer: the projections around a cache, which owns keys, values, positions, RoPE and softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shadowkv.layers.norm import JointNorm, RMSNorm
from shadowkv.layers.spec import LayerSpec, projection


class Cache(Protocol):
    """What the attention layer needs from a cache. Tokens of all sequences are packed; ``batch`` says whose they are.

    Queries and keys arrive before RoPE and after any QK norm. Scores are scaled by 1/sqrt(d). ``sinks``, float32 [Hq],
    are scores of one more position in every softmax, whose value is 0.
    """

    def append(self, layer: int, k: Tensor, v: Tensor, batch: Any) -> None:
        """Takes the keys and values, each [T, H, d], of the batch's tokens."""

    def begin(self, layer: int, q: Tensor, batch: Any, sinks: Tensor | None = None) -> Callable[[], Tensor]:
        """Begins causal attention of the queries [T, Hq, d] over their sequences, their own tokens included.

        The returned function finishes it -> [T, Hq, d]. Other work may be launched first: a cache may await the host.
        """
        ...


class Attention(nn.Module):
    """q, k, v from one joined projection, attention by the cache, output projection."""

    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    sinks: nn.Parameter | None

    def __init__(self, spec: LayerSpec, layer: int) -> None:
        super().__init__()
        shape = spec.shape
        self.layer, self.group = layer, spec.group
        self.num_query_heads = shape.num_query_heads
        self.num_kv_heads = shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.query_dim = shape.num_query_heads * shape.head_dim
        self.qkv_dim = self.query_dim + 2 * shape.kv_dim
        self.qkv = projection(
            spec,
            "attention.qkv",
            spec.hidden_size,
            self.qkv_dim,
            bias=spec.qkv_bias,
            borders=(self.query_dim,),
        )
        self.out = projection(spec, "attention.out", self.query_dim, spec.hidden_size, bias=spec.out_bias)
        eps, dtype, device = spec.rms_norm_eps, spec.norm_dtype, spec.device
        if spec.normed_heads is not None:
            heads = (shape.num_query_heads, shape.num_kv_heads)
            self.query_norm, self.key_norm = (
                JointNorm(here, whole, shape.head_dim, eps, dtype=dtype, device=device, group=spec.group)
                for here, whole in zip(heads, spec.normed_heads, strict=True)
            )
        elif spec.qk_norm:
            self.query_norm, self.key_norm = (
                RMSNorm(shape.head_dim, eps, dtype=dtype, device=device) for _ in range(2)
            )
        else:
            self.query_norm = self.key_norm = None
        self.sinks = None
        if spec.sinks:
            empty = torch.empty(shape.num_query_heads, dtype=torch.float32, device=spec.device)
            self.sinks = nn.Parameter(empty, requires_grad=False)

    def begin(self, x: Tensor, cache: Cache, batch: Any, wanted: Tensor | None = None) -> Callable[[], Tensor]:
        """Appends and attends with one projection: normalised hidden states [T, D] -> a function that returns [T, D].

        With ``wanted``, int64 [n], the result is [n, D], for those tokens only.
        """
        qkv = self.qkv(x)
        self._store(qkv[:, self.query_dim :], cache, batch)
        return self._begin(qkv[:, : self.query_dim], cache, batch, wanted)

    def append(self, x: Tensor, cache: Cache, batch: Any) -> None:
        """Stores keys and values of normalised hidden states [T, D] in the cache."""
        self._store(self.qkv.rows(x, self.query_dim, self.qkv_dim), cache, batch)

    def attend(self, x: Tensor, cache: Cache, batch: Any) -> Tensor:
        """Attention of tokens whose keys and values are in the cache: [T, D] -> [T, D]."""
        return self._begin(self.qkv.rows(x, 0, self.query_dim), cache, batch)()

    def _store(self, kv: Tensor, cache: Cache, batch: Any) -> None:
        k, v = kv.unflatten(-1, (2 * self.num_kv_heads, self.head_dim)).split(self.num_kv_heads, dim=1)
        if self.key_norm is not None:
            k = self.key_norm(k)
        cache.append(self.layer, k, v, batch)

    def _begin(self, q: Tensor, cache: Cache, batch: Any, wanted: Tensor | None = None) -> Callable[[], Tensor]:
        q = q.unflatten(-1, (self.num_query_heads, self.head_dim))
        if self.query_norm is not None:
            q = self.query_norm(q)
        attended = cache.begin(self.layer, q, batch, self.sinks)
        return lambda: self.group.sum(self.out(_of(attended().flatten(-2), wanted)))


def _of(rows: Tensor, wanted: Tensor | None) -> Tensor:
    return rows if wanted is None else rows[wanted]
