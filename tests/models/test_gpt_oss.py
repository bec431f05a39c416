"""gpt-oss's files: experts joined, interleaved and transposed, or in MXFP4, and what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bad_files import edit_json
from dense_cache import packed_logits
from families import build, oracle_logits
from quantized_files import mxfp4, spiked
from safetensors.torch import load_file, save_file
from test_families import assert_same, sequences
from test_quantized_formats import assert_close
from thread_group import on_ranks

from shadowkv.kvcache.policy.shape import FULL
from shadowkv.layers.group import Group
from shadowkv.layers.quantized_matrix import QuantizedMatrix
from shadowkv.models import Decoder, load_config, load_model
from shadowkv.models.checkpoints.quantized.fp4 import MXFP4
from shadowkv.models.loader import load_plan
from shadowkv.models.sharding import Shard
from shadowkv.models.storage import planned_row_blocks
from shadowkv.ops.activation_rows.reference import gated_activation

EXPERTS = "model.layers.0.mlp.experts"
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def write_mxfp4(folder: Path) -> tuple[Path, Path]:
    """A model whose experts are in MXFP4, as published, and its twin of the numbers that these stand for."""
    sizes = {"hidden_size": 96, "intermediate_size": 64}
    for name in ("quantized", "plain"):
        build("gpt_oss", folder / name, sizes)
    edit_json(folder / "quantized" / "config.json", quantization_config=CONFIG)
    tensors = load_file(folder / "plain" / "model.safetensors")
    generator, quantized = torch.Generator().manual_seed(0), dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = quantized.pop(name).shape
        parts, numbers = mxfp4(spiked(experts * rows, columns, generator))
        groups = columns // 32
        quantized[f"{name}_blocks"] = parts["weight_packed"].view(experts, rows, groups, 16)
        quantized[f"{name}_scales"] = parts["weight_scale"].view(experts, rows, groups)
        tensors[name] = numbers.view(experts, rows, columns).transpose(1, 2).contiguous()
    save_file(tensors, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    save_file(quantized, folder / "quantized" / "model.safetensors")
    return folder / "quantized", folder / "plain"


def test_gates_and_up_are_clamped() -> None:
    """Of a gate both ends: it has no lower one."""
    gate, up = torch.tensor([9.0, -9.0, 1.0, 1.0]), torch.tensor([0.0, 0.0, 9.0, -9.0])
    glu = torch.tensor([7.0, -9.0, 1.0, 1.0])
    wanted = glu * torch.sigmoid(1.702 * glu) * torch.tensor([1.0, 1.0, 8.0, -6.0])
    torch.testing.assert_close(gated_activation(torch.cat((gate, up)), "clamped_silu"), wanted)


def test_mxfp4_files_give_the_logits_of_their_numbers(tmp_path: Path) -> None:
    files, plain = write_mxfp4(tmp_path)
    ours, theirs = load_model(files), load_model(plain)
    experts = ours.model.layers[1].mlp.experts
    for projection in (experts.gate_up, experts.down):
        assert isinstance(projection.weight, QuantizedMatrix)
        assert {block.form for block in projection.weight.row_blocks} == {MXFP4}
    assert ours.model.num_parameters == theirs.model.num_parameters
    assert ours.model.expert_bytes < 0.2 * theirs.model.expert_bytes
    wanted = packed_logits(theirs.model, sequences())
    assert_close(packed_logits(ours.model, sequences()), wanted)
    for expert_parallel in (False, True):

        def part(group: Group, whole: bool = expert_parallel) -> list[torch.Tensor]:
            return packed_logits(load_model(files, group=group, expert_parallel=whole).model, sequences())

        for found in on_ranks(2, part):
            assert_close(found, wanted)


def test_transformers_reads_the_numbers_as_this_does(tmp_path: Path) -> None:
    """The twin that MXFP4 files are held to."""
    from transformers import AutoModelForCausalLM

    _, plain = write_mxfp4(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager", dtype=torch.float32).eval()
    assert_same(packed_logits(load_model(plain).model, sequences()), oracle_logits(theirs, sequences()))


def test_random_weights_are_in_the_form_that_the_config_says(tmp_path: Path) -> None:
    files, _ = write_mxfp4(tmp_path)
    config, forms = load_plan(files)
    assert set(forms.values()) == {MXFP4} and all(".experts." in name for name in forms)
    planned = Decoder(config, torch.float32, "meta", planned_row_blocks(Shard(config), forms, torch.float32))
    random, stored = load_model(files, load_format="dummy").model, load_model(files).model
    assert planned.num_bytes == random.num_bytes == stored.num_bytes
    assert all(logits.isfinite().all() for logits in packed_logits(random, sequences()))


@pytest.mark.parametrize(("name", "layers", "experts"), [("gpt-oss-20b", 24, 32), ("gpt-oss-120b", 36, 128)])
def test_the_published_configs(name: str, layers: int, experts: int) -> None:
    config, forms = load_plan(name)
    assert [kind.window for kind in config.layer_kinds] == [128, None] * (layers // 2)
    assert config.layer_kinds[1] == FULL and config.max_position == 131072
    assert config.experts is not None
    assert (config.experts.routing.experts, config.experts.routing.per_token) == (experts, 4)
    assert (config.rope.scaling, config.rope.factor, config.rope.truncate) == ("yarn", 32.0, False)
    assert config.eos_token_ids == (200002, 199999, 200012)
    assert len(forms) == 3 * layers * experts


def test_layers_alternate_where_a_config_does_not_say_it(tmp_path: Path) -> None:
    build("gpt_oss", tmp_path, {"num_hidden_layers": 5})
    config = load_config(tmp_path)
    edit_json(tmp_path / "config.json", layer_types=None)
    assert load_config(tmp_path) == config
    assert [kind.window for kind in config.layer_kinds] == [9, None, 9, None, 9]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"swiglu_limit": 5.0}, r"swiglu_limit=5\.0 is not supported, only 7\.0"),
        ({"swiglu_alpha": 1.0}, r"swiglu_alpha=1\.0 is not supported, only 1\.702"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act=gelu_pytorch_tanh is not supported, only silu"),
        ({"num_local_experts": None}, "num_local_experts is missing"),
        ({"layer_types": ["full_attention"]}, "layer_types is not a list of full_attention or sliding_attention"),
    ],
)
def test_configs_that_cannot_be_run(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    build("gpt_oss", tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(ValueError, match=reason):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        (f"{EXPERTS}.gate_up_proj", (7, 48, 160), r"unexpected: .*experts\.gate_up_proj \(7, 48, 160\)"),
        (f"{EXPERTS}.gate_up_proj", (8, 160, 48), r"experts\.0\.gate_proj\.weight is \(24, 160\), needs \(80, 48\)"),
        (f"{EXPERTS}.gate_up_proj", (8, 48, 159), r"experts\.0\.up_proj\.weight is \(79, 48\), needs \(80, 48\)"),
        (f"{EXPERTS}.down_proj", (8, 48, 80), r"experts\.0\.down_proj\.weight is \(80, 48\), needs \(48, 80\)"),
        (f"{EXPERTS}.gate_up_proj_bias", (8, 80), r"experts\.0\.gate_proj\.bias is \(40,\), needs \(80,\)"),
        (f"{EXPERTS}.down_proj_bias", (384,), r"unexpected: .*experts\.down_proj_bias \(384,\)"),
        (f"{EXPERTS}.down_proj_bias", None, r"missing: .*experts\.0\.down_proj\.bias"),
        ("model.layers.1.mlp.router.bias", None, r"missing: model\.layers\.1\.mlp\.router\.bias"),
        ("model.layers.1.self_attn.sinks", (2,), r"model\.layers\.1\.self_attn\.sinks is \(2,\), needs \(4,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(
    name: str, shape: tuple[int, ...] | None, reason: str, tmp_path: Path
) -> None:
    build("gpt_oss", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors if shape is None else {**tensors, name: torch.zeros(shape)}, file)
    with pytest.raises(ValueError, match=reason):
        load_model(tmp_path)


def test_mxfp4_of_another_width_is_named(tmp_path: Path) -> None:
    files, _ = write_mxfp4(tmp_path)
    edit_json(files / "config.json", intermediate_size=128)
    with pytest.raises(ValueError, match=r"experts\.0\.gate_proj\.bias is \(64,\), needs \(128,\)"):
        load_model(files)
