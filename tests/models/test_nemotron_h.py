"""Nemotron-H's files and configs. ``test_qwen3_5.py`` runs it beside the other hybrids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import peak_bytes
from bad_files import edit_json
from dense_cache import packed_logits
from families import build, oracle_logits
from quantized_files import write_quantized
from safetensors.torch import load_file, save_file
from test_families import assert_same, sequences
from test_quantized_formats import assert_close

from shadowkv.engine.startup.sizing import block_bytes
from shadowkv.layers.quantized_matrix import QuantizedLinear
from shadowkv.layers.spec import StateSpace
from shadowkv.models import load_config, load_model
from shadowkv.ops.linear_attention.reference import ssd
from shadowkv.ops.recurrence import Spans


def test_blocks_can_be_letters(tmp_path: Path) -> None:
    build("nemotron_h-experts", tmp_path)
    listed = load_config(tmp_path)
    assert [bool(kind.state) for kind in listed.layer_kinds] == [True, False, True, True]
    assert (listed.bare_layers, listed.dense_layers) == ((3,), (2,))
    edit_json(tmp_path / "config.json", layers_block_type=None, hybrid_override_pattern="ME*EM-M")
    assert load_config(tmp_path) == listed


@pytest.mark.parametrize("limits", [None, [0.0, float("inf")]], ids=str)
def test_time_steps_without_limits(limits: Any, tmp_path: Path) -> None:
    """As published files write them, and left out."""
    build("nemotron_h", tmp_path)
    stated = load_config(tmp_path)
    edit_json(tmp_path / "config.json", time_step_limit=limits)
    assert load_config(tmp_path) == stated


def test_layers_that_draft_tokens_are_left_out(tmp_path: Path) -> None:
    theirs = build("nemotron_h", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert "backbone.layers.0.mixer.in_proj.weight" in weights, "the published names"
    save_file(weights | {"mtp.layers.0.mixer.q_proj.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path, dtype=torch.float32)
    assert_same(packed_logits(loaded.model, sequences()), oracle_logits(theirs, sequences()))


@pytest.mark.parametrize("kind", ["awq", "fp8, blocks", "int8", "nvfp4"])
def test_quantized_checkpoints(kind: str, tmp_path: Path) -> None:
    sizes = {"mamba_head_dim": 32, "mamba_num_heads": 48, "ssm_state_size": 32}
    sizes |= dict.fromkeys(("moe_intermediate_size", "moe_shared_expert_intermediate_size"), 64)
    quantized, plain = (load_model(path) for path in write_quantized(tmp_path, kind, "nemotron_h-experts", **sizes))
    assert any(isinstance(module, QuantizedLinear) for module in quantized.model.layers[0].linear_attention.modules())
    assert_close(packed_logits(quantized.model, sequences()), packed_logits(plain.model, sequences()))


def test_what_is_left_for_a_block_is_what_mamba_2_takes(seed: int) -> None:
    """Its projections, and the state space model of Nemotron 3 Nano's shapes."""
    config, tokens = load_config("nemotron-3-nano-30b-a3b"), 1024
    sizes = config.linear
    assert isinstance(sizes, StateSpace)
    x = torch.randn(tokens, sizes.heads, sizes.head_dim).bfloat16()
    b, c = torch.randn(2, tokens, sizes.groups, sizes.state_dim).bfloat16()
    dt, a = torch.rand(tokens, sizes.heads), -torch.rand(sizes.heads)
    states, row = torch.zeros(1, sizes.heads, sizes.state_dim, sizes.head_dim), torch.zeros(1, dtype=torch.int64)
    taken = peak_bytes(lambda: ssd(x, dt, a, b, c, a, states, Spans((tokens,), row, row)))
    projected = tokens * (config.hidden_size + 2 * (sizes.channels + sizes.values)) * 2
    assert taken + projected <= block_bytes(config, tokens, torch.bfloat16) <= 1.5 * taken + projected


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"n_groups": 0}, "n_groups=0 is not a whole number from 1 to 4096"),
        ({"n_groups": 4}, "mamba_num_heads=6 is not a multiple of n_groups=4"),
        ({"conv_kernel": 1}, "conv_kernel=1 is less than 2"),
        ({"use_bias": True}, "use_bias=True is not supported, only False"),
        ({"use_conv_bias": False}, "use_conv_bias=False is not supported, only True"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu' is not supported, only 'relu2'"),
        ({"moe_latent_size": 64}, "moe_latent_size=64 is not supported, only None"),
        ({"time_step_limit": [0.1, 0.01]}, r"time_step_limit=\[0\.1, 0\.01\] is not a list of a least and a largest"),
        ({"time_step_limit": 0.1}, r"time_step_limit=0\.1 is not a list"),
        ({"layers_block_type": ["mamba", "attn"]}, r"layers_block_type=\['mamba', 'attn'\] is not a list of mamba, "),
        ({"layers_block_type": None}, "hybrid_override_pattern=None is not a text of the letters"),
        (
            {"layers_block_type": None, "hybrid_override_pattern": "M*X"},
            "is not a text of the letters",
        ),
        ({"hybrid_override_pattern": "M*"}, r"hybrid_override_pattern='M\*' is not supported beside another"),
        ({"num_hidden_layers": 4}, "num_hidden_layers=4 is not supported: the config lists 9 blocks"),
        ({"layers_block_type": ["mlp", "mamba", "attention"]}, "block 0 has an MLP or experts, and no block with"),
        ({"layers_block_type": ["mamba", "mlp", "mlp", "attention"]}, "block 2 has an MLP or experts"),
        ({"layers_block_type": ["mamba", "mlp"]}, "no block has attention"),
        ({"layers_block_type": ["attention", "mlp"]}, "no block has Mamba-2"),
        ({"layers_block_type": ["mamba", "attention", "moe"], "n_routed_experts": None}, "n_routed_experts is missing"),
    ],
)
def test_configs_that_cannot_be_run(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    build("nemotron_h", tmp_path)
    edit_json(tmp_path / "config.json", **fields)
    with pytest.raises(ValueError, match=words):
        load_config(tmp_path)
