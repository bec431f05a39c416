"""The rotation against float64 angles, its frequencies against transformers'."""

import math
from dataclasses import replace

import pytest
import torch
from plain_formulas import assert_close, rope
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables

LONG = tuple(1 + i / 8 for i in range(32))
CONFIGS = {
    "default": RopeConfig(64, 1e4),
    "interleaved": RopeConfig(64, 1e4, interleaved=True),
    "partial": RopeConfig(96, 5e5, rotary_dim=48),
    "partial interleaved": RopeConfig(128, 1e4, rotary_dim=64, interleaved=True),
    "linear": RopeConfig(64, 1e4, scaling="linear", factor=8.0),
    "llama3": RopeConfig(128, 5e5, scaling="llama3", factor=8.0, original_max_position=8192),
    "yarn": RopeConfig(64, 1e6, scaling="yarn", factor=4.0, original_max_position=4096),
    "longrope": RopeConfig(64, 1e4, scaling="longrope", factor=32.0, original_max_position=4096, factors=LONG),
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@configs
def test_rotation_turns_each_pair_by_position_times_frequency(ops, seed, config):
    tables = RotaryTables(config, 400)
    positions = torch.tensor([0, 1, 2, 63, 64, 255, 399])[torch.randperm(7)]
    x = torch.randn(7, 3, config.head_dim)
    out = ops.apply_rope(x, positions, tables)
    expected = [[rope(head, position, config) for head in row] for row, position in zip(x, positions.tolist())]
    assert_close(out, torch.stack([torch.stack(row) for row in expected]), atol=3e-6)


def test_rotation_is_exact_up_to_a_million_positions(ops, seed):
    config = RopeConfig(8, 1e4)
    tables = RotaryTables(config, 2**20 + 1)
    positions = torch.cat((torch.tensor([2**20, 2**20 - 1, 999_999, 524_289]), torch.randint(2**20, (30,))))
    x = torch.randn(34, 2, 8)
    expected = [[rope(head, position, config) for head in row] for row, position in zip(x, positions.tolist())]
    assert_close(ops.apply_rope(x, positions, tables), torch.stack([torch.stack(row) for row in expected]), atol=3e-6)


@configs
def test_position_zero_only_scales(ops, seed, config):
    x = torch.randn(1, 2, config.head_dim)
    out = ops.apply_rope(x, torch.tensor([0]), RotaryTables(config, 1))
    assert_close(out[..., : config.dim], x[..., : config.dim].double() * config.magnitude, atol=1e-6)
    assert torch.equal(out[..., config.dim :], x[..., config.dim :])


@configs
@pytest.mark.parametrize("shape", [(5,), (2, 3), (1,)])
def test_inverse_undoes_the_rotation_for_positions_of_any_shape(ops, seed, config, shape):
    tables = RotaryTables(config, 500)
    positions = torch.randint(500, shape)
    x = torch.randn(*shape, 2, config.head_dim)
    found = ops.apply_rope(x, positions, tables)
    assert found.shape == x.shape
    assert_close(ops.apply_rope(found, positions, tables, inverse=True), x, atol=5e-6)
    assert_close(ops.apply_rope(ops.apply_rope(x, positions, tables, inverse=True), positions, tables), x, atol=5e-6)


@configs
def test_scores_depend_on_distance_alone(ops, seed, config):
    tables = RotaryTables(config, 300)
    q, k = torch.randn(2, 1, 1, config.head_dim)

    def score(i: int, j: int) -> float:
        return (
            (ops.apply_rope(q, torch.tensor([i]), tables) * ops.apply_rope(k, torch.tensor([j]), tables)).sum().item()
        )

    assert score(210, 170) == pytest.approx(score(290, 250), abs=1e-3)
    assert any(score(210, 170) != pytest.approx(score(210, j), abs=1e-3) for j in range(171, 200))


@pytest.mark.parametrize("name", ["default", "yarn", "partial", "interleaved"])
@pytest.mark.parametrize("inverse", [False, True])
def test_low_precision_is_rotated_in_float32_and_rounded_once(ops, seed, name, inverse):
    config = CONFIGS[name]
    tables, positions = RotaryTables(config, 5000), torch.randint(5000, (20,))
    x = torch.randn(20, 3, config.head_dim).bfloat16()
    out = ops.apply_rope(x, positions, tables, inverse=inverse)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, ops.apply_rope(x.float(), positions, tables, inverse=inverse).bfloat16())


@pytest.mark.parametrize("interleaved", [False, True])
def test_dimensions_past_the_rotary_ones_pass_untouched(ops, seed, interleaved):
    config = RopeConfig(96, 1e4, rotary_dim=32, interleaved=interleaved)
    x = torch.randn(4, 2, 96)
    x[..., 32:] *= 1e30
    out = ops.apply_rope(x, torch.arange(4) + 7, RotaryTables(config, 20))
    assert torch.equal(out[..., 32:], x[..., 32:])
    assert not torch.isclose(out[..., :32], x[..., :32]).all()


@configs
def test_tables_hold_float32_cos_and_sin_with_the_magnitude(config):
    tables = RotaryTables(config, 50)
    assert tables.cos.shape == tables.sin.shape == (50, config.dim // 2)
    assert tables.cos.dtype == tables.sin.dtype == torch.float32
    assert_close(tables.cos**2 + tables.sin**2, torch.full_like(tables.cos, config.magnitude**2), atol=1e-6)


def hf_rope(config: RopeConfig, **rope: object) -> tuple[torch.Tensor, float]:
    """Frequencies and magnitude as transformers computes them."""
    hf = LlamaConfig(
        head_dim=config.head_dim,
        hidden_size=4 * config.head_dim,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": config.theta, **rope},
    )
    if rope["rope_type"] == "default":
        embedding = LlamaRotaryEmbedding(hf)
        return embedding.inv_freq, embedding.attention_scaling
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](hf, torch.device("cpu"), seq_len=131072)


SCALINGS = [
    (RopeConfig(64, 1e4), {"rope_type": "default"}),
    (RopeConfig(128, 5e5), {"rope_type": "default"}),
    (CONFIGS["linear"], {"rope_type": "linear", "factor": 8.0}),
    (
        RopeConfig(96, 1e4, rotary_dim=48, scaling="linear", factor=2.5),
        {"rope_type": "linear", "factor": 2.5, "partial_rotary_factor": 0.5},
    ),
    (
        CONFIGS["llama3"],
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    (
        replace(CONFIGS["llama3"], head_dim=64, factor=32.0, low_freq_factor=2.0, high_freq_factor=16.0),
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 2.0,
            "high_freq_factor": 16.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    (CONFIGS["yarn"], {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}),
    (
        replace(CONFIGS["yarn"], truncate=False, beta_fast=20.0, beta_slow=2.0, factor=7.5),
        {
            "rope_type": "yarn",
            "factor": 7.5,
            "beta_fast": 20.0,
            "beta_slow": 2.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    (
        replace(CONFIGS["yarn"], attention_factor=1.25, theta=1e4, original_max_position=64),
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, "original_max_position_embeddings": 64},
    ),
    (
        CONFIGS["longrope"],
        {
            "rope_type": "longrope",
            "factor": 32.0,
            "short_factor": [1.0] * 32,
            "long_factor": list(LONG),
            "original_max_position_embeddings": 4096,
        },
    ),
    (
        replace(CONFIGS["longrope"], attention_factor=1.5),
        {
            "rope_type": "longrope",
            "factor": 32.0,
            "attention_factor": 1.5,
            "short_factor": [1.0] * 32,
            "long_factor": list(LONG),
            "original_max_position_embeddings": 4096,
        },
    ),
]


@pytest.mark.parametrize(
    ("config", "rope"), SCALINGS, ids=[f"{i}-{rope['rope_type']}" for i, (_, rope) in enumerate(SCALINGS)]
)
def test_frequencies_and_magnitude_are_those_of_transformers(config, rope):
    frequencies, magnitude = hf_rope(config, **rope)
    ours = config.inverse_frequencies()
    assert ours.dtype == torch.float64
    assert ours.shape == (config.dim // 2,)
    torch.testing.assert_close(ours, frequencies.double(), rtol=2e-6, atol=0)
    assert config.magnitude == pytest.approx(magnitude)


def test_a_factor_of_one_or_less_leaves_the_magnitude_at_one():
    assert replace(CONFIGS["yarn"], factor=1.0).magnitude == 1.0
    assert replace(CONFIGS["longrope"], factor=0.5).magnitude == 1.0
    assert replace(CONFIGS["linear"], attention_factor=3.0).magnitude == 1.0
    assert CONFIGS["yarn"].magnitude == pytest.approx(0.1 * math.log(4) + 1)


def test_unknown_scaling_and_wrong_number_of_factors_are_named():
    with pytest.raises(ValueError, match="'ntk'"):
        RopeConfig(64, scaling="ntk").inverse_frequencies()
    with pytest.raises(ValueError, match="32 factors, got 3"):
        RopeConfig(64, scaling="longrope", factors=(1.0, 2.0, 3.0)).inverse_frequencies()
