"""Attention layer: the projections around a cache, which owns keys, values, positions, RoPE and softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shadowkv.layers.norm import JointNorm, RMSNorm
from shadowkv.layers.spec import LayerSpec, projection


class Cache(Protocol):
    """What the attention layer needs from a cache. Tokens of all sequences are packed; ``batch`` says whose they are,
    and of which of them attention is needed (``of_needed``).

    Queries and keys arrive before RoPE and after any QK norm. Scores are scaled by 1/sqrt(d). ``sinks``, float32 [Hq],
    are scores of one more position in every softmax, whose value is 0.
    """

    def append(self, layer: int, k: Tensor, v: Tensor, batch: Any) -> None:
        """Takes the keys and values, each [T, H, d], of the batch's tokens."""

    def start(self, layer: int, q: Tensor, batch: Any, sinks: Tensor | None = None) -> Callable[[], Tensor]:
        """Starts causal attention of the queries [T, Hq, d] over their sequences, their own tokens included.

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

    def start(self, x: Tensor, cache: Cache, batch: Any) -> Callable[[], Tensor]:
        """Appends and attends with one projection: normalised hidden states [T, D] -> a function that returns [n, D],
        for the tokens whose attention the batch needs."""
        qkv = self.qkv(x)
        self._store(qkv[:, self.query_dim :], cache, batch)
        q = qkv[:, : self.query_dim].unflatten(-1, (self.num_query_heads, self.head_dim))
        if self.query_norm is not None:
            q = self.query_norm(q)
        finish = cache.start(self.layer, q, batch, self.sinks)
        return lambda: self.group.sum(self.out(batch.of_needed(finish().flatten(-2))))

    def append(self, x: Tensor, cache: Cache, batch: Any) -> None:
        """Stores keys and values of normalised hidden states [T, D] in the cache, where no attention is needed."""
        self._store(self.qkv.rows(x, self.query_dim, self.qkv_dim), cache, batch)

    def _store(self, kv: Tensor, cache: Cache, batch: Any) -> None:
        k, v = kv.unflatten(-1, (2 * self.num_kv_heads, self.head_dim)).split(self.num_kv_heads, dim=1)
        if self.key_norm is not None:
            k = self.key_norm(k)
        cache.append(self.layer, k, v, batch)
