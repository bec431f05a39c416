"""A LoRA adapter merged at load equals the formula; one that does not fit says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from safetensors.torch import save_file

from shadowkv.models import load_model

SIZES = {
    "self_attn.q_proj": (48, 48),
    "self_attn.v_proj": (24, 48),
    "mlp.up_proj": (80, 48),
    "mlp.down_proj": (48, 80),
}


def write_adapter(directory: Path, pairs: dict[str, torch.Tensor], **fields: Any) -> Path:
    directory.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", "target_modules": None, **fields}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(pairs, directory / "adapter_model.safetensors")
    return directory


def random_pairs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    pairs = {}
    for layer in range(2):
        for module, (rows, columns) in SIZES.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            pairs[f"{name}.lora_A.weight"] = torch.randn(4, columns, generator=generator)
            pairs[f"{name}.lora_B.weight"] = torch.randn(rows, 4, generator=generator)
    return pairs


@pytest.mark.parametrize("rslora", [False, True])
def test_merge_equals_the_formula(rslora: bool, tmp_path: Path) -> None:
    base = tmp_path / "base"
    build("llama-tied", base)
    pairs = random_pairs()
    adapter = write_adapter(
        tmp_path / "adapter", pairs, use_rslora=rslora, target_modules=[name.split(".")[1] for name in SIZES]
    )
    plain = load_model(base, dtype=torch.float32).model
    merged = load_model(
        base, dtype=torch.float32, adapter=adapter, hf_overrides={"rope_theta": 4e6}, max_model_len=9999
    )
    assert merged.config.rope.theta == 4e6
    assert merged.config.max_position == 9999
    scale = 6 / (2.0 if rslora else 4.0)

    def update(layer: int, module: str) -> torch.Tensor:
        name = f"base_model.model.model.layers.{layer}.{module}"
        return scale * (pairs[f"{name}.lora_B.weight"] @ pairs[f"{name}.lora_A.weight"])

    for layer in range(2):
        before, after = plain.layers[layer], merged.model.layers[layer]
        change = after.attention.qkv.weight - before.attention.qkv.weight
        torch.testing.assert_close(change[:48], update(layer, "self_attn.q_proj"), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(change[48:72], torch.zeros(24, 48))
        torch.testing.assert_close(change[72:], update(layer, "self_attn.v_proj"), atol=1e-5, rtol=1e-5)
        change = after.mlp.gate_up.weight - before.mlp.gate_up.weight
        torch.testing.assert_close(change[:80], torch.zeros(80, 48))
        torch.testing.assert_close(change[80:], update(layer, "mlp.up_proj"), atol=1e-5, rtol=1e-5)
        change = after.mlp.down.weight - before.mlp.down.weight
        torch.testing.assert_close(change, update(layer, "mlp.down_proj"), atol=1e-5, rtol=1e-5)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    build("llama", tmp_path / "base")
    return tmp_path / "base"


def test_modules_that_match_nothing_are_named(base: Path, tmp_path: Path) -> None:
    pairs = {"model.layers.9.mlp.up_proj.lora_A.weight": torch.ones(4, 48)}
    pairs["model.layers.9.mlp.up_proj.lora_B.weight"] = torch.ones(80, 4)
    adapter = write_adapter(tmp_path / "adapter", pairs)
    with pytest.raises(ValueError, match=r"the model lacks: model\.layers\.9\.mlp\.up_proj"):
        load_model(base, adapter=adapter)


def test_every_reason_at_once(base: Path, tmp_path: Path) -> None:
    pairs = {
        "model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(4, 48),
        "model.layers.0.mlp.up_proj.lora_magnitude_vector": torch.ones(80),
    }
    adapter = write_adapter(tmp_path / "adapter", pairs, use_dora=True, target_modules=["q_proj"])
    with pytest.raises(ValueError) as raised:
        load_model(base, adapter=adapter)
    for reason in ("use_dora=True", "only one of", "lora_magnitude_vector is not a LoRA", "not among target_modules"):
        assert reason in str(raised.value)


def test_wrong_shape_is_an_error(base: Path, tmp_path: Path) -> None:
    pairs = {"model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(4, 12)}
    pairs["model.layers.0.mlp.up_proj.lora_B.weight"] = torch.ones(80, 4)
    with pytest.raises(ValueError, match=r"\(80, 12\), the model's \(80, 48\)"):
        load_model(base, adapter=write_adapter(tmp_path / "adapter", pairs))


def test_int8_matrices_are_multiplied_by_their_rows_scales(base: Path, tmp_path: Path) -> None:
    codes, scale = torch.arange(-96, 96, dtype=torch.int8).reshape(4, 48), torch.tensor([[0.5], [1.0], [2.0], [4.0]])
    name = "model.layers.0.mlp.up_proj"
    pairs = {f"{name}.lora_A.weight": codes, f"{name}.lora_A.weight_scale": scale}
    pairs[f"{name}.lora_B.weight"] = torch.ones(80, 4)
    int8 = load_model(base, adapter=write_adapter(tmp_path / "int8", pairs)).model
    pairs = {f"{name}.lora_A.weight": codes * scale, f"{name}.lora_B.weight": torch.ones(80, 4)}
    whole = load_model(base, adapter=write_adapter(tmp_path / "whole", pairs)).model
    assert torch.equal(int8.layers[0].mlp.gate_up.weight, whole.layers[0].mlp.gate_up.weight)


def test_int8_matrices_and_scales_belong_together(base: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj"
    pairs = {f"{name}.lora_A.weight": torch.ones(4, 48), f"{name}.lora_A.weight_scale": torch.ones(4, 1)}
    pairs[f"{name}.lora_B.weight"] = torch.ones(80, 4, dtype=torch.int8)
    with pytest.raises(ValueError) as raised:
        load_model(base, adapter=write_adapter(tmp_path / "adapter", pairs))
    assert "lora_A.weight_scale belongs to no int8 matrix" in str(raised.value)
    assert "lora_B.weight is int8 and has no scale for each of its 80 rows" in str(raised.value)


def test_missing_files(base: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json"):
        load_model(base, adapter=tmp_path)
    adapter = write_adapter(tmp_path / "adapter", random_pairs())
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.safetensors"):
        load_model(base, adapter=adapter)
