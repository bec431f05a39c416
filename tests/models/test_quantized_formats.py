"""Quantized checkpoints of every format: answers as of the numbers that they stand for, memory as of the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bad_files import edit_json, edit_tensors
from dense_cache import packed_logits
from families import oracle_logits
from quantized_files import FP8_BLOCK, GROUP, KINDS, SIZES, schemes, write_quantized
from safetensors.torch import load_file
from test_adapter import write_adapter
from test_families import sequences
from thread_group import on_ranks
from transformers import AutoModelForCausalLM

from shadowkv.layers.group import Group
from shadowkv.layers.quantized_matrix import QuantizedLinear, QuantizedMatrix
from shadowkv.models import LoadedModel, load_config, load_model, storage
from shadowkv.models.checkpoints.stored_weight import FP8_ROWS
from shadowkv.models.loader import load_plan
from shadowkv.ops.quantized.groups import GroupForm
from shadowkv.ops.quantized_matmul import humming
from shadowkv.wording import counted

WEIGHTS, LAYER = "model.safetensors", "model.layers.1"
SCATTERED = "gptq, scattered"
FORMS = {
    "awq": GroupForm("int4", GROUP, torch.float16, zeros=True),
    "gptq": GroupForm("int4", GROUP, torch.float16),
    "gptq, in order": GroupForm("int4", GROUP, torch.float16),
    "gptq, zero points": GroupForm("int4", GROUP, torch.float16, zeros=True),
    "gptq, zero points, v2": GroupForm("int4", GROUP, torch.float16, zeros=True),
    "gptq, 8 bits": GroupForm("int8", GROUP, torch.float16, zeros=True),
    "int4": GroupForm("int4", GROUP, torch.float16),
    "int4, zero points": GroupForm("int4", GROUP, torch.float16, zeros=True),
    "int4, rows": GroupForm("int4", None, torch.float16),
    "int8": GroupForm("int8", None, torch.float16),
    "int8, whole": GroupForm("int8", None, torch.float32),
    "modelopt fp8": FP8_ROWS,
    "int8 products": GroupForm("int8", None, torch.float32),
    "fp8, rows": FP8_ROWS,
    "fp8, blocks": GroupForm("e4m3", FP8_BLOCK, torch.float32),
    "fp8, Qwen3's blocks": GroupForm("e4m3", FP8_BLOCK, torch.float32),
    "nvfp4": GroupForm("e2m1", 16, torch.float8_e4m3fn, factor=True),
    "modelopt nvfp4": GroupForm("e2m1", 16, torch.float8_e4m3fn, factor=True),
    "mxfp4": GroupForm("e2m1", 32, torch.float8_e8m0fnu),
}
BITS = {"awq": 4 + 24 / GROUP, "gptq": 4 + 16 / GROUP, "nvfp4": 4.5 + 32 / 256, "mxfp4": 4.25, "fp8, blocks": 8.25}
"""Of a number in rows of 256: its code, its part of a group's scale and zero point, and of a row's factor."""


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert other.abs().max() > 0.1
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-4 * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_numbers(kind: str, tmp_path: Path) -> None:
    """Of transformers' model with dequantized weights, too, which has none of this engine's code."""
    files, plain = write_quantized(tmp_path, kind)
    ours, theirs = load_model(files), load_model(plain)
    forms = {
        block.form
        for module in ours.model.modules()
        if isinstance(module, QuantizedMatrix)
        for block in module.row_blocks
    }
    assert forms - {None} == ({FORMS[kind]} if kind in FORMS else set())
    assert ours.model.num_parameters == theirs.model.num_parameters
    oracle = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    for lengths in ((9, 1, 5), (150,)):
        tokens = sequences(lengths)
        found = packed_logits(ours.model, tokens)
        assert_close(found, packed_logits(theirs.model, tokens))
        assert_close(found, oracle_logits(oracle, tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_no_more_is_lost_than_by_its_products(kind: str, tmp_path: Path) -> None:
    files, plain = write_quantized(tmp_path, kind)
    exact = torch.cat(packed_logits(load_model(plain).model, sequences()))
    low, quantized = (
        torch.cat(packed_logits(load_model(path, dtype="bfloat16").model, sequences())) for path in (plain, files)
    )
    assert (quantized - exact).norm() < 2 * (low - exact).norm()


@pytest.mark.parametrize("case", ["qwen3", "phi3", "glm4", "llama-tied"])
@pytest.mark.parametrize("kind", ["awq", "nvfp4", "fp8, Qwen3's blocks"])
def test_other_families(kind: str, case: str, tmp_path: Path) -> None:
    """Joined in the files, tied heads; scales of what is joined here differ from one to the next."""
    files, plain = write_quantized(tmp_path, kind, case)
    assert_close(*(packed_logits(load_model(path).model, sequences()) for path in (files, plain)))


@pytest.mark.parametrize("kind", BITS)
def test_bytes_are_those_of_the_files(kind: str, tmp_path: Path) -> None:
    model = load_model(write_quantized(tmp_path, kind)[0]).model
    gate_up = model.layers[1].mlp.gate_up
    assert isinstance(gate_up, QuantizedLinear)
    assert gate_up.weight.nbytes == 2 * SIZES["intermediate_size"] * SIZES["hidden_size"] * BITS[kind] / 8
    assert not isinstance(model.layers[0].mlp.down, QuantizedLinear)  # as the files have it


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "v2" not in kind])
def test_ranks_give_the_logits_of_the_whole(kind: str, size: int, tmp_path: Path) -> None:
    """The MLP's 320 columns are cut at 160, or at 112 and 224: in the middle of groups of 64 and of 128."""
    files, plain = write_quantized(tmp_path, kind)
    expected = packed_logits(load_model(plain).model, sequences())

    def part(group: Group) -> tuple[LoadedModel, list[torch.Tensor]]:
        loaded = load_model(files, group=group)
        return loaded, packed_logits(loaded.model, sequences())

    for loaded, found in on_ranks(size, part):
        assert_close(found, expected)
        assert isinstance(loaded.model.layers[1].mlp.down, QuantizedLinear) == (kind != SCATTERED)


def test_groups_that_a_rank_cuts_become_smaller_ones(tmp_path: Path) -> None:
    files, _ = write_quantized(tmp_path, "int4")
    loaded = on_ranks(2, lambda group: load_model(files, group=group))
    for rank in loaded:
        (block,) = rank.model.layers[1].mlp.down.weight.row_blocks
        assert block.form == GroupForm("int4", 32, torch.float16)  # of 320 columns, at 160
        assert {block.form for block in rank.model.layers[1].attention.out.weight.row_blocks} == {FORMS["int4"]}


def test_what_an_adapter_changes_is_dequantized_and_said(tmp_path: Path) -> None:
    files, plain = write_quantized(tmp_path, "gptq")
    module = f"{LAYER}.self_attn.k_proj"
    rows = load_file(plain / WEIGHTS)[f"{module}.weight"].shape[0]
    sides = {"A": torch.randn(4, 256), "B": 0.1 * torch.randn(rows, 4)}
    pairs = {f"base_model.model.{module}.lora_{side}.weight": matrix for side, matrix in sides.items()}
    adapter = write_adapter(tmp_path / "adapter", pairs)
    ours, theirs = load_model(files, adapter=adapter), load_model(plain, adapter=adapter)
    assert ours.notes == (f"1 weights that the adapter changes are dequantized: {module}.weight, ...",)
    assert [block.form for block in ours.model.layers[1].attention.qkv.weight.row_blocks] == [
        FORMS["gptq"],
        None,
        FORMS["gptq"],
    ]
    assert_close(packed_logits(ours.model, sequences()), packed_logits(theirs.model, sequences()))


def test_columns_in_the_order_of_activations_are_said(tmp_path: Path) -> None:
    loaded = load_model(write_quantized(tmp_path, SCATTERED)[0])
    assert loaded.model.forms == []
    assert loaded.notes == (
        "13 weights with groups of columns in the order of activations (desc_act) are dequantized: "
        "model.layers.0.mlp.gate_proj.weight, ...",
    )


CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"))


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("kind", KINDS)
def test_where_nothing_multiplies_them_they_are_dequantized_and_said(
    kind: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, in float16 8-bit floats too: the model loads, and one line says what that takes."""
    if device == "cpu":
        monkeypatch.setattr(storage, "kept", lambda forms, config, dtype, device: {})
    files, plain = write_quantized(tmp_path, kind)
    ours, theirs = (load_model(path, dtype="float16", device=device) for path in (files, plain))
    assert ours.model.forms == []
    for name, parameter in theirs.model.named_parameters():
        torch.testing.assert_close(ours.model.get_parameter(name), parameter, rtol=2**-10, atol=2**-24)
    if kind == "gptq":
        why = "on cpu there is no matrix product for this form"
        if device == "cuda":
            wrong_dtype = "on cuda weights stay quantized only with dtype='bfloat16', not 'float16'"
            why = "; ".join(humming.missing()) or wrong_dtype
        line = f"13 weights in int4-g64 are dequantized to float16, 0.00 GiB instead of 0.00: {why}"
        assert ours.notes == (line,)


INT4, EXPERT = GroupForm("int4", 128, torch.float16), "model.layers.0.mlp.experts.3.up_proj.weight"
MIXED = {"model.layers.0.self_attn.q_proj.weight": INT4, EXPERT: INT4}
"""Weights of one layer, [64, 128] each."""


def test_each_reason_why_weights_are_dequantized_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is not named where it would not help."""
    monkeypatch.setattr(humming, "missing", lambda: ["it is not here"])
    shapes, cuda = dict.fromkeys(MIXED, (64, 128)), torch.device("cuda")

    def reasons(quantization: str | None) -> list[str]:
        lines = storage.dequantized(MIXED, shapes, torch.bfloat16, cuda, quantization)
        start = f"{counted(2 // len(lines), 'weight')} in int4-g128 are dequantized to bfloat16, "
        assert all(line.startswith(start) for line in lines)
        return [line.partition(": ")[2] for line in lines]

    assert reasons(None) == ["it is not here"]
    assert reasons("fp8") == [
        "with quantization='fp8', only experts keep the checkpoint's format",
        "it is not here",
    ]


def test_scales_of_caches_are_not_used_and_said(tmp_path: Path) -> None:
    files, plain = write_quantized(tmp_path, "modelopt nvfp4")
    scales = {f"{LAYER}.self_attn.{side}_proj.{side}_scale": torch.ones(()) for side in "kv"}
    edit_tensors(files / WEIGHTS, **scales, **{f"{LAYER}.self_attn.q_proj.input_scale": torch.ones(())})
    loaded = load_model(files)
    assert loaded.notes == (
        f"scales of keys and values in the files are not used: {LAYER}.self_attn.k_proj.k_scale, ...",
    )
    assert_close(packed_logits(loaded.model, sequences()), packed_logits(load_model(plain).model, sequences()))


def test_a_quantized_head(tmp_path: Path) -> None:
    files, plain = write_quantized(tmp_path, "gptq")
    parts, numbers = KINDS["gptq"][1](torch.randn(96, 256))
    edit_tensors(files / WEIGHTS, lm_head__weight=None, **{f"lm_head.{name}": part for name, part in parts.items()})
    edit_tensors(plain / WEIGHTS, lm_head__weight=numbers)
    ours = load_model(files)
    assert isinstance(ours.model.head, QuantizedMatrix)
    expected = packed_logits(load_model(plain).model, sequences())
    assert_close(packed_logits(ours.model, sequences()), expected)
    for found in on_ranks(2, lambda group: packed_logits(load_model(files, group=group).model, sequences())):
        assert_close(found, expected)


def test_schemes_that_differ_by_module(tmp_path: Path) -> None:
    """Names go before expressions, and these before classes."""
    files, plain = write_quantized(tmp_path, "int4")
    module = f"{LAYER}.mlp.up_proj"
    parts, numbers = KINDS["int8"][1](torch.randn(320, 256))
    edit_tensors(files / WEIGHTS, **{f"{module}.{name}": part for name, part in parts.items()})
    edit_tensors(plain / WEIGHTS, **{f"{module}.weight": numbers})
    config, int8 = KINDS["int4"][0], KINDS["int8"][0]["config_groups"]["group_0"]
    for targets in ([module], ["re:.*1[.]mlp[.]up_proj$"]):
        groups = {**config["config_groups"], "group_1": int8 | {"targets": targets}}
        edit_json(files / "config.json", quantization_config=config | {"config_groups": groups})
        ours = load_model(files)
        forms = [block.form for block in ours.model.layers[1].mlp.gate_up.weight.row_blocks]
        assert forms == [FORMS["int4"], FORMS["int8"]]
        assert_close(packed_logits(ours.model, sequences()), packed_logits(load_model(plain).model, sequences()))


def test_what_modelopt_says_beside_the_config(tmp_path: Path) -> None:
    files, _ = write_quantized(tmp_path, "modelopt nvfp4")
    edit_json(files / "config.json", quantization_config=...)
    (files / "hf_quant_config.json").write_text(
        '{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}'
    )
    assert load_model(files).model.forms == ["nvfp4"]


Q = f"{LAYER}.self_attn.q_proj"


@pytest.mark.parametrize(
    ("kind", "name", "tensor", "reason"),
    [
        ("awq", "qzeros", None, f"{Q}: qzeros is missing beside"),
        ("awq", "scales", torch.ones(3, 256).half(), r"qzeros is I32 \(4, 32\), not I32 \(3, 32\)"),
        (
            "awq",
            "scales",
            torch.ones(4, 256).double(),
            r"scales is F64 \(4, 256\), and scales are one of F16",
        ),
        ("awq", "qweight", torch.ones(256, 32), r"qweight is F32 \(256, 32\), not I32"),
        ("gptq", "qzeros", torch.full((4, 32), 0x66666666).int(), "says sym, but zero points are not all 8"),
        ("gptq", "qweight", torch.zeros(31, 256).int(), "4 scales do not divide rows of 248|needs"),
        ("gptq", "g_idx", torch.zeros(9).int(), r"g_idx is I32 \(9,\), not I32 or I64 \(256,\)"),
        (
            "gptq, scattered",
            "g_idx",
            torch.full((256,), 4).int(),
            "its columns are in groups 4 to 4, but scales are only for groups 0 to 3",
        ),
        ("int4", "weight_shape", torch.tensor([256, 300]), r"weight_packed is I32 \(256, 32\), not I32 \(256, 38\)"),
        (
            "int4, zero points",
            "weight_zero_point",
            torch.ones(2, 2),
            r"weight_zero_point is F32 \(2, 2\), not I32",
        ),
        ("nvfp4", "weight_global_scale", None, "weight_global_scale is missing"),
        ("mxfp4", "weight_scale", torch.zeros(256, 4, dtype=torch.uint8), "has groups of 64 columns, not of 32"),
        ("modelopt nvfp4", "weight_scale_2", torch.ones(2), r"weight_scale_2 is F32 \(2,\), not F32"),
        (
            "int4",
            "qweight",
            torch.zeros(2, 2).int(),
            r"q_proj.qweight is I32, and not part of a weight in com",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    kind: str, name: str, tensor: torch.Tensor | None, reason: str, tmp_path: Path
) -> None:
    files, _ = write_quantized(tmp_path, kind)
    edit_tensors(files / WEIGHTS, **{f"{Q}.{name}": tensor})
    with pytest.raises(ValueError, match=reason) as raised:
        load_model(files)
    assert str(files) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_any_shape_are_one_line(kind: str, tmp_path: Path) -> None:
    """Files may be corrupt or malicious: each part of a weight in turn has a shape that it cannot have."""
    files, _ = write_quantized(tmp_path, kind)
    good = load_file(files / WEIGHTS)
    for name in [name for name in good if name.startswith(f"{Q}.")]:
        for shape in ((), (0,), (0, 0), (3,), (1, 1, 1), (256, 0), (0, 256), (7, 5)):
            one_scale = shape == () and ("weight_scale" in name or "global_scale" in name)
            if shape == good[name].shape or (one_scale and kind.startswith(("int8 products", "fp8", "nvfp4"))):
                continue
            edit_tensors(files / WEIGHTS, **{name: torch.zeros(shape).to(good[name].dtype)})
            with pytest.raises(ValueError) as raised:
                load_model(files)
            assert "q_proj" in str(raised.value) and "\n" not in str(raised.value), (name, shape)
            edit_tensors(files / WEIGHTS, **{name: good[name]})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"targets": ["re:(a+)+b"]}, "repeats too much to be matched safely"),
        ({"targets": ["re:.*.*.*.*.*.*.*"]}, "repeats too much to be matched safely"),
        ({"targets": ["re:["]}, "is not a regular expression"),
        ({"targets": ["re:.*other.*"]}, f"{LAYER}.mlp.down_proj is quantized, and no group of the config has it"),
    ],
)
def test_targets_that_cannot_be(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    files, _ = write_quantized(tmp_path, "int4")
    config = schemes("pack-quantized", **KINDS["int4"][0]["config_groups"]["group_0"]["weights"])
    config["config_groups"]["group_0"] |= changes
    edit_json(files / "config.json", quantization_config=config)
    with pytest.raises(ValueError, match=reason):
        load_model(files)


@pytest.mark.parametrize("quantization", ["fp8-block", "awq", "gptq", "int8", "nvfp4", "mxfp4"])
def test_random_weights_in_a_form(quantization: str, tmp_path: Path) -> None:
    """About as large as those of a plain model."""
    _, plain = write_quantized(tmp_path, "awq")
    model = load_model(plain, load_format="dummy", quantization=quantization).model
    assert len(model.forms) == 1
    for module in model.modules():
        if isinstance(module, QuantizedMatrix):
            (rows,) = module.stored(0, module.num_rows)
            deviation = rows.form.unpack(rows.tensors).std().item()
            assert deviation == pytest.approx(module.columns**-0.5, rel=0.45 if quantization == "mxfp4" else 0.05)


@pytest.mark.parametrize("kind", ["gptq", "fp8, Qwen3's blocks"])
def test_they_are_dequantized_where_that_is_asked_for(kind: str, tmp_path: Path) -> None:
    files, plain = write_quantized(tmp_path, kind)
    ours, theirs = load_model(files, quantization="none"), load_model(plain)
    assert (ours.model.forms, ours.config.quantization) == ([], None)
    for name, parameter in theirs.model.named_parameters():
        torch.testing.assert_close(ours.model.get_parameter(name), parameter)
    assert len(ours.notes) == 1 and ours.notes[0].endswith(": quantization='none'")
    assert load_plan(files, quantization="none") == (load_config(plain), {})
    assert load_model(plain, quantization="none").notes == ()


def test_a_flag_says_what_the_files_say(tmp_path: Path) -> None:
    files, _ = write_quantized(tmp_path, "gptq")
    assert load_model(files, quantization="gptq").model.forms == ["int4-g64"]
    assert load_config(files, quantization="gptq") == load_config(files)
    with pytest.raises(ValueError, match=r"quantization='awq': the files of .* are in gptq and are loaded as they are"):
        load_model(files, quantization="awq")
