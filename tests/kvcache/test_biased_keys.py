"""Keys with a large bias before RoPE (Qwen2's projections have one) must be coded as well as keys without."""

import pytest
import torch
from driver import DEVICE, SHAPE, Stream, decode, make_cache, plain_attention, prefill

from shadowkv.kvcache.codecs import ROW_CODECS
from shadowkv.kvcache.parts import resolve
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.presets import preset

S, STEPS = 700, 100


def mean_error(kv: str, bias: float) -> float:
    """Mean relative error of generated tokens' attention outputs against exact attention."""
    cache = make_cache(preset(kv, rank=32 if kv.startswith("turbo") else None))
    stream = Stream(11, cache.allocate(S, S + STEPS))
    shape = SHAPE.num_layers, 1, SHAPE.num_kv_heads, SHAPE.head_dim
    stream.k += bias * torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    prefill(cache, [(stream, S)])
    for _ in range(STEPS - 1):
        decode(cache, [stream])
    ours, exact = (x[S:].flatten(1) for x in (stream.output(), plain_attention(stream)))
    return ((ours - exact).norm(dim=1) / exact.norm(dim=1)).mean().item()


@pytest.mark.parametrize(
    "kv",
    [
        "turbo:budget=1.0",  # 8-bit latents and 3-bit values
        "turbo:budget=1.0,values=dense",  # 8-bit latents
        "turbo:budget=256,values=dense",  # and the sketch
        "turbo-host:budget=256",
        "full:keys=rotated-4bit,values=rotated-4bit,centred=true",
        "quest:keys=rotated-4bit,budget=1.0,centred=true",
    ],
)
def test_a_bias_of_the_keys_adds_little_to_the_error(kv: str) -> None:
    plain = mean_error(kv, 0)
    assert mean_error(kv, 3) < 1.2 * plain
    assert mean_error(kv, 10) < 1.2 * plain


@pytest.mark.parametrize("keys", sorted(codec for codec in ROW_CODECS if "keys" in ROW_CODECS[codec].axes))
@pytest.mark.parametrize("bias", [False, True])
def test_coded_keys_are_centred_where_the_model_has_a_bias(keys: str, bias: bool) -> None:
    shape = ModelShape(2, 4, 2, 128, key_bias=bias)
    assert resolve(preset(f"full:keys={keys}"), shape).as_dict()["centred"] is bias
    assert resolve(preset(f"full:keys={keys},centred=false"), shape).as_dict()["centred"] is False
    assert "centred" not in resolve(preset("turbo"), shape).as_dict()  # low-rank keys are, whatever the model


def test_eight_bits_hold_nothing_of_keys_beside_a_large_bias() -> None:
    assert mean_error("fp8:centred=true", 100) < 1.2 * mean_error("fp8", 0)
    assert mean_error("fp8:centred=false", 100) > 4 * mean_error("fp8", 0)


def test_the_mean_of_keys_costs_coded_ones_what_leaving_it_out_saves() -> None:
    kv = "full:keys=rotated-4bit"
    assert mean_error(kv, 3) > 2 * mean_error(f"{kv},centred=true", 3)
