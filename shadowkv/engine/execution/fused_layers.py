"""Fused decode steps on a CPU: all layers in one call of an op. If sequences are compressed, there is one call for each
layer with attention, and one more.

Without fusion, a small model's step on a CPU spends most of its time between ops. ``Runner.step`` uses ``FusedLayers``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import cast

from torch import Tensor

from shadowkv.kvcache.batch import Batch
from shadowkv.kvcache.decode.decode_batch import DecodeBatch
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.recurrent.recurrent_part import RecurrentPart
from shadowkv.layers.attention import Attention
from shadowkv.layers.decoder_layer import DecoderLayer
from shadowkv.layers.gated_delta_net import GatedDeltaNet
from shadowkv.layers.linear import FP8Linear
from shadowkv.layers.mlp import MLP
from shadowkv.layers.norm import RMSNorm
from shadowkv.layers.quantized_matrix import QuantizedLinear, QuantizedMatrix
from shadowkv.layers.spec import CONVOLUTION, RECURRENT, LinearAttention, Projection
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.decoder import Decoder
from shadowkv.ops.decode_layers import layers as op
from shadowkv.ops.quantized.blocks import BlockForm

REPLACED = (
    *("rms_norm", "add_rms_norm", "gated_activation", "quantized_matmul", "apply_rope", "append_tokens"),
    *("paged_attention", "causal_convolution", "gated_delta_rule"),
)
"""Ops that layers call without fusion. The op ``decode_layers`` has kernels of its own instead of them."""


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
        config, modules = model.config, cast("list[DecoderLayer]", list(model.layers))
        pages, states = zip(exact.k, exact.v, strict=True), _by_layer(exact.states)
        mixers = [
            _delta_net(layer.linear_attention, next(states))
            if isinstance(layer.linear_attention, GatedDeltaNet)
            else _attention(layer.attention, *next(pages))
            for layer in modules
        ]
        layers = [_layer(*pair) for pair in zip(modules, mixers, strict=True)]
        tiled = isinstance(config.linear, LinearAttention) and config.linear.tiled
        self._all = op.Layers(layers, config.rms_norm_eps, exact.rotary, config.output_gate, tiled)
        attending = [number for number, attends in enumerate(self._all.attentions) if attends]
        self._first, self._last = self._all.part(slice(attending[0] + 1)), self._all.part(slice(attending[-1], None))
        self._between = [self._all.part(slice(first, last + 1)) for first, last in pairwise(attending)]

    @staticmethod
    def fit(model: Decoder, cache: KVCache) -> bool:
        """Whether the op supports this model and this cache, and runs in its C++ kernel. It must bypass no backend that
        an override names, and none from outside the package."""
        ops = cache.ops
        kernel = "decode_layers" in ops.called and ops.backends["decode_layers"] == "cpu"
        bypassed = [name for name in REPLACED if name in ops.overridden and ops.backends[name] != "cpu"]
        alone = model.group.size == 1 and not model.config.quantization and model.config.experts is None
        matrices = [module for module in model.modules() if isinstance(module, QuantizedMatrix)]
        row_blocks = [block for matrix in matrices for block in matrix.row_blocks]
        known = all(block.form is None or isinstance(block.form, BlockForm) for block in row_blocks)
        kernel = kernel and not (bypassed or ops.outside)
        return kernel and alone and known and _supported(model.config) and cache.exact_layers() is not None

    def __call__(self, x: Tensor, step: Batch) -> Tensor:
        """Computes all layers of a decode step. ``x`` [B, D] is the residual stream of the B tokens before the first
        layer. Returns the stream after the last layer."""
        batch = cast(DecodeBatch, step.groups[0][0])
        places = batch.positions, batch.pages, batch.counts, batch.write_page, batch.write_offset
        recurrent = [cast(RecurrentPart, part) for (part,) in step.groups[1:]]
        tokens = op.NewTokens(*places, *(part.rounds[0].spans for part in recurrent))
        decode = self._ops.decode_layers
        if batch.compressed is None:
            result: Tensor = decode(x, None, self._all, tokens, False)[0]
            return result
        attend = self._attend_beside
        x, q, out, lse, gate = decode(x, None, self._first, tokens, True)
        for number, layers in enumerate(self._between):
            x, q, out, lse, gate = decode(x, (attend(number, q, out, lse, batch), gate), layers, tokens, True)
        attention_result = attend(len(self._between), q, out, lse, batch), gate
        result = decode(x, attention_result, self._last, tokens, False)[0]
        return result


def _supported(config: ModelConfig) -> bool:
    linear = config.linear
    gated = linear is None or (isinstance(linear, LinearAttention) and linear.gate == "silu")
    return config.activation == "silu" and gated and not (config.sinks or config.streams)


def _by_layer(states: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The states of each layer with linear attention."""
    return (dict(zip(states, arrays, strict=True)) for arrays in zip(*states.values(), strict=True))


def _attention(attention: Attention | None, k_pages: Tensor, v_pages: Tensor) -> op.Attention:
    assert attention is not None, "Mamba-2 does not fit"
    return op.Attention(_weight(attention.query_norm), _weight(attention.key_norm), k_pages, v_pages)


def _delta_net(delta_net: GatedDeltaNet, states: Mapping[str, Tensor]) -> op.DeltaNet:
    weights = delta_net.convolution.squeeze(1), delta_net.log_rate, delta_net.rate_bias, delta_net.norm.weight
    return op.DeltaNet(*weights, states[CONVOLUTION], states[RECURRENT])


def _layer(layer: DecoderLayer, mixer: op.Attention | op.DeltaNet) -> op.Layer:
    linear_attention, attention, mlp = layer.linear_attention, layer.attention, layer.mlp
    assert isinstance(mlp, MLP) and layer.mlp_norm is not None, "layers without an MLP do not fit"
    if isinstance(linear_attention, GatedDeltaNet):
        row_blocks = [_projection(one).row_blocks for one in (linear_attention.qkvz, linear_attention.beta_decay)]
        inputs, out = op.Projection(row_blocks[0] + row_blocks[1]), linear_attention.out
    else:
        assert attention is not None, "Mamba-2 does not fit"
        inputs, out = _projection(attention.qkv), attention.out
    return op.Layer(
        layer.attention_norm.weight,
        mixer,
        inputs,
        _projection(out),
        _weight(layer.post_attention_norm),
        layer.mlp_norm.weight,
        _projection(mlp.gate_up),
        _projection(mlp.down),
        _weight(layer.post_mlp_norm),
    )


def _projection(by: Projection) -> op.Projection:
    assert not isinstance(by, FP8Linear), "FP8 weights do not fit"
    if isinstance(by, QuantizedLinear):
        return op.Projection(tuple(by.weight.stored(0, by.out_features)), by.bias)
    return op.Projection((by.weight,), by.bias)


def _weight(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight
