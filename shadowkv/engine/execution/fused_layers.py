"""Fused decode steps on a CPU: all layers in one call of an op, or one call per layer if sequences are compressed.

Without fusion, a small model's step on a CPU spends most of its time between ops. ``Runner.step`` uses
``FusedLayers``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from torch import Tensor

from shadowkv.kvcache.batch import Batch
from shadowkv.kvcache.decode.decode_batch import DecodeBatch
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.layers.decoder_layer import DecoderLayer
from shadowkv.layers.linear import FP8Linear
from shadowkv.layers.mlp import MLP
from shadowkv.layers.norm import RMSNorm
from shadowkv.layers.quantized_matrix import QuantizedLinear, QuantizedMatrix
from shadowkv.layers.spec import Projection
from shadowkv.models.decoder import Decoder
from shadowkv.ops.decode_layers import layers as op
from shadowkv.ops.quantized.blocks import BlockForm


class FusedLayers:
    """A model's layers as arguments of the op ``decode_layers``.

    Args:
        model, cache: a pair for which ``fit`` returns True.

    Attributes:
        calls: names of the called ops.
    """

    calls = ("decode_layers",)

    def __init__(self, model: Decoder, cache: KVCache) -> None:
        exact = cache.exact_layers()
        assert exact is not None, "the cache does not fit"
        self._ops, self._attend_beside = cache.ops, exact.attend_beside
        eps, rotary = model.config.rms_norm_eps, exact.rotary
        modules = cast("list[DecoderLayer]", list(model.layers))
        layers = [_layer(layer, *pages) for layer, *pages in zip(modules, exact.k, exact.v, strict=True)]

        def joined(some: Sequence[op.Layer]) -> op.Layers:
            return op.Layers(some, eps, rotary)

        self._all, self._first, self._last = joined(layers), joined(layers[:1]), joined(layers[-1:])
        self._neighbours = [joined(pair) for pair in pairwise(layers)]

    @staticmethod
    def fit(model: Decoder, cache: KVCache) -> bool:
        """Whether the op supports this model and this cache, and runs in its C++ kernel."""
        ops = cache.ops
        kernel = "decode_layers" in ops.called and ops.backends["decode_layers"] != "reference"
        alone = model.group.size == 1 and not model.config.quantization and model.config.experts is None
        matrices = [module for module in model.modules() if isinstance(module, QuantizedMatrix)]
        row_blocks = [block for matrix in matrices for block in matrix.row_blocks]
        known = all(block.form is None or isinstance(block.form, BlockForm) for block in row_blocks)
        config = model.config
        plain = config.activation == "silu" and not (
            config.sinks or config.output_gate or config.wide_norms or config.streams
        )
        # The op calls its own kernels. It would bypass backends that plugins have registered for other ops.
        kernel = kernel and not ops.outside
        return kernel and alone and known and plain and cache.exact_layers() is not None

    def __call__(self, x: Tensor, step: Batch) -> Tensor:
        """Computes all layers of a decode step. ``x`` [B, D] is the residual stream of the B tokens before the first
        layer. Returns the stream after the last layer."""
        batch = cast(DecodeBatch, step.groups[0][0])
        places = batch.positions, batch.pages, batch.counts, batch.write_page, batch.write_offset
        tokens, decode = op.NewTokens(*places), self._ops.decode_layers
        if batch.compressed is None:
            result: Tensor = decode(x, None, self._all, tokens, False)[0]
            return result
        attend = self._attend_beside
        x, q, out, lse = decode(x, None, self._first, tokens, True)
        for number, pair in enumerate(self._neighbours):
            x, q, out, lse = decode(x, attend(number, q, out, lse, batch), pair, tokens, True)
        result = decode(x, attend(len(self._neighbours), q, out, lse, batch), self._last, tokens, False)[0]
        return result


def _layer(layer: DecoderLayer, k_pages: Tensor, v_pages: Tensor) -> op.Layer:
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(mlp, MLP) and attention is not None, "experts and linear attention do not fit"
    assert layer.mlp_norm is not None, "a layer with an MLP has its norm"
    return op.Layer(
        layer.attention_norm.weight,
        _projection(attention.qkv),
        _weight(attention.query_norm),
        _weight(attention.key_norm),
        _projection(attention.out),
        _weight(layer.post_attention_norm),
        layer.mlp_norm.weight,
        _projection(mlp.gate_up),
        _projection(mlp.down),
        _weight(layer.post_mlp_norm),
        k_pages,
        v_pages,
    )


def _projection(by: Projection) -> op.Projection:
    assert not isinstance(by, FP8Linear), "FP8 weights do not fit"
    if isinstance(by, QuantizedLinear):
        return op.Projection(tuple(by.weight.stored(0, by.out_features)), by.bias)
    return op.Projection((by.weight,), by.bias)


def _weight(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight
