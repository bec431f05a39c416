"""Weights in 8-bit floats on the CPU, by the ops' references: quantized while they load, or as fp8 files have them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bad_files import edit_json, edit_tensors
from dense_cache import DenseBatch, DenseCache, packed_logits
from families import build
from fp8_files import KINDS, compressed_tensors, dequantize, write_fp8
from gguf_files import write_model
from safetensors.torch import save_file
from test_adapter import random_pairs, write_adapter
from test_families import LENGTHS, sequences

from shadowkv.layers.linear import SCALE, FP8Linear
from shadowkv.models import Decoder, load_config, load_model, loader
from shadowkv.models.loader import unfit
from shadowkv.ops.activation_rows.reference import FP8, quantize_tokens
from shadowkv.ops.registry import Ops

CONFIG, WEIGHTS = "config.json", "model.safetensors"
LAYER = "model.layers.1"


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The references stand in for hardware."""
    monkeypatch.setattr(loader, "unfit", lambda device, dtype: None)


def projections(model: Decoder) -> dict[str, FP8Linear]:
    found = {name: module for name, module in model.named_modules() if isinstance(module, FP8Linear)}
    assert len(found) == 4 * model.config.num_layers
    return found


def plain(linear: FP8Linear) -> torch.Tensor:
    return linear.weight.float() * linear.weight_scale


@pytest.mark.parametrize("case", ["llama", "llama-bias-head-dim", "phi3", "glm4", "qwen3-tied", "llama, gguf"])
def test_every_row_of_a_projection_is_quantized_and_all_else_exact(anywhere: None, case: str, tmp_path: Path) -> None:
    name, _, gguf = case.partition(", ")
    oracle, path = build(name, tmp_path), tmp_path
    if gguf:
        path = write_model(tmp_path / "model.gguf", oracle)
    exact, low = (load_model(path, dtype="bfloat16", quantization=name).model for name in (None, "fp8"))
    assert (exact.config.quantization, low.config.quantization) == (None, "fp8")
    wide = load_model(path, dtype="float32").model
    parameters, scales = dict(low.named_parameters()), 0
    for name, weight in exact.named_parameters():
        if name + SCALE in parameters:
            codes, scale = quantize_tokens(dict(wide.named_parameters())[name])  # of the files' own numbers
            assert torch.equal(parameters[name].float(), codes.float())
            assert torch.equal(parameters[name + SCALE], scale)
            scales += scale.nbytes
        else:
            assert torch.equal(parameters[name], weight)
    quantized = sum(linear.weight.numel() for linear in projections(low).values())
    assert low.num_parameters == exact.num_parameters
    assert low.num_bytes == exact.num_bytes - quantized + scales


@pytest.mark.parametrize("case", ["llama-bias-head-dim", "qwen3", "phi3", "glm4"])
def test_logits_are_close_to_the_unquantized_models(anywhere: None, case: str, tmp_path: Path) -> None:
    build(case, tmp_path)
    exact, low = (load_model(tmp_path, dtype="float32", quantization=name).model for name in (None, "fp8"))
    wanted, got = (torch.cat(packed_logits(model, sequences())) for model in (exact, low))
    # Codes are off by a 32nd on average, weights and activations independently, through eight projections in a row.
    error = (got - wanted).norm() / wanted.norm()
    assert 0.005 < error < 0.15


def test_blocks_and_decode_steps_equal_the_whole_layer(anywhere: None, tmp_path: Path) -> None:
    """Rows of a projection give what the whole one gives; a token's scale depends on no other token."""
    build("llama-bias-head-dim", tmp_path)
    model = load_model(tmp_path, dtype="float32", quantization="fp8").model
    model.use(Ops())
    layer, batch = model.layers[1], DenseBatch.of(list(LENGTHS))
    x = torch.randn(sum(LENGTHS), 48, generator=torch.Generator().manual_seed(1))
    whole = torch.add(*layer.start(x, None, DenseCache(model.config.rope), batch)())
    cache, ends = DenseCache(model.config.rope), []
    for start in range(0, len(x), 7):
        block = batch.block(start, start + 7)
        ends.append(torch.add(*layer.start(x[start : start + 7], None, cache, block)()))
    torch.testing.assert_close(torch.cat(ends), whole, atol=1e-5, rtol=0)
    linear = layer.attention.qkv
    # Sums of 48 products in any two orders.
    weight = linear.weight.float() * linear.weight_scale
    apart = 48 * 2.0**-23 * float((x.abs() @ weight.abs().T).amax())
    torch.testing.assert_close(linear.rows(x, 16, 48), linear(x)[:, 16:48], atol=apart, rtol=0)
    torch.testing.assert_close(linear(x[3:4]), linear(x)[3:4], atol=apart, rtol=0)


def test_dummy_weights(anywhere: None, tmp_path: Path) -> None:
    build("qwen3", tmp_path)
    model = load_model(tmp_path, load_format="dummy", dtype="bfloat16", quantization="fp8").model
    for linear in projections(model).values():
        assert plain(linear).std().item() == pytest.approx(linear.weight.shape[1] ** -0.5, rel=0.1)
        assert (linear.weight.float().abs().amax(1) == 448).all()
    assert load_config(tmp_path, quantization="fp8") == model.config


def test_an_adapter_is_merged_first(anywhere: None, tmp_path: Path) -> None:
    build("llama", tmp_path / "base")
    pairs = {name: tensor for name, tensor in random_pairs().items() if ".mlp." in name}
    adapter = write_adapter(tmp_path / "adapter", pairs)
    wide, low = (
        load_model(tmp_path / "base", dtype="float32", adapter=adapter, quantization=name).model
        for name in (None, "fp8")
    )
    for name, linear in projections(low).items():
        assert torch.equal(linear.weight_scale, quantize_tokens(wide.get_submodule(name).weight)[1])


JOINED = {
    "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attention.out": ["self_attn.o_proj"],
    "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.down": ["mlp.down_proj"],
}


BECAME = ("weights in fp8-g32 became 8-bit floats with one scale per row",)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_in_fp8_loads_as_it_is(anywhere: None, kind: str, tmp_path: Path) -> None:
    tensors = write_fp8(tmp_path, kind)
    _, scale_name, of = KINDS[kind]
    loaded = load_model(tmp_path, dtype="bfloat16")
    assert loaded.config == load_config(tmp_path) and loaded.config.quantization == "fp8"
    assert loaded.model.embedding.dtype == loaded.model.head.dtype == torch.bfloat16
    for layer in range(2):
        for ours, theirs in JOINED.items():
            linear = loaded.model.get_submodule(f"layers.{layer}.{ours}")
            names = [f"model.layers.{layer}.{name}" for name in theirs]
            codes = [tensors[f"{name}.weight"] for name in names]
            scales = [tensors[f"{name}.{scale_name}"] for name in names]
            numbers = torch.cat([dequantize(*pair) for pair in zip(codes, scales, strict=True)])
            assert linear.weight.dtype == FP8 and linear.weight_scale.dtype == torch.float32
            if of == "blocks":  # a scale for every row instead
                again, scale = quantize_tokens(numbers)
                assert torch.equal(linear.weight.float(), again.float()) and torch.equal(linear.weight_scale, scale)
            else:
                assert torch.equal(linear.weight.view(torch.uint8), torch.cat(codes).view(torch.uint8))
                assert torch.equal(plain(linear), numbers)
    assert loaded.notes == (BECAME if of == "blocks" else ())
    assert load_model(tmp_path, dtype="bfloat16", quantization="fp8").config == loaded.config


def test_joined_projections_in_the_files(anywhere: None, tmp_path: Path) -> None:
    tensors = write_fp8(tmp_path, "compressed-tensors, whole", case="phi3")
    linear = load_model(tmp_path, dtype="bfloat16").model.layers[1].attention.qkv
    assert torch.equal(linear.weight.float(), tensors[f"{LAYER}.self_attn.qkv_proj.weight"].float())
    assert (linear.weight_scale == tensors[f"{LAYER}.self_attn.qkv_proj.weight_scale"].float()).all()


def test_scales_may_be_in_another_file(anywhere: None, tmp_path: Path) -> None:
    tensors = write_fp8(tmp_path, "fbgemm_fp8")
    (tmp_path / WEIGHTS).unlink()
    for number, scales in enumerate((False, True)):
        part = {name: tensor for name, tensor in tensors.items() if name.endswith("_scale") == scales}
        save_file(part, tmp_path / f"model-{number}.safetensors")
    linear = load_model(tmp_path, dtype="bfloat16").model.layers[1].mlp.down
    assert torch.equal(linear.weight_scale, tensors[f"{LAYER}.mlp.down_proj.weight_scale"].float())


def test_what_the_files_have_unquantized_is_quantized_and_said(anywhere: None, tmp_path: Path) -> None:
    tensors = write_fp8(tmp_path, "fbgemm_fp8", keep=("q_proj", "layers.0.mlp.down_proj"))
    loaded = load_model(tmp_path, dtype="bfloat16")
    assert loaded.notes == (
        "3 weights that the files have unquantized are quantized too: model.layers.0.self_attn.q_proj.weight, ...",
    )
    _, scale = quantize_tokens(tensors[f"{LAYER}.self_attn.q_proj.weight"])
    assert torch.equal(loaded.model.layers[1].attention.qkv.weight_scale[:64], scale)


def test_an_adapter_on_a_checkpoint_in_fp8(anywhere: None, tmp_path: Path) -> None:
    tensors = write_fp8(tmp_path / "base", "fbgemm_fp8")
    pairs = {name: tensor for name, tensor in random_pairs().items() if "1.mlp.down" in name}
    adapter = write_adapter(tmp_path / "adapter", pairs)
    linear = load_model(tmp_path / "base", dtype="bfloat16", adapter=adapter).model.layers[1].mlp.down
    module = f"{LAYER}.mlp.down_proj"
    update = [pairs[f"base_model.model.{module}.lora_{side}.weight"] for side in "BA"]
    numbers = dequantize(tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]) + 1.5 * update[0] @ update[1]
    torch.testing.assert_close(linear.weight_scale, quantize_tokens(numbers)[1], rtol=1e-5, atol=0)


def test_a_head_in_fp8_becomes_plain_numbers(anywhere: None, tmp_path: Path) -> None:
    write_fp8(tmp_path, "fbgemm_fp8")
    codes, scale = torch.randn(96, 48).to(FP8), torch.rand(96, 1)
    edit_tensors(tmp_path / WEIGHTS, lm_head__weight=codes, lm_head__weight_scale=scale)
    head = load_model(tmp_path, dtype="bfloat16").model.head
    assert torch.equal(head, (codes.float() * scale).bfloat16())


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("weight_scale", None, r"q_proj.weight is F8_E4M3 and has 0 of weight_scale and weight_scale_inv beside it"),
        ("weight_scale_inv", torch.ones(64, 1), r"q_proj.weight is F8_E4M3 and has 2 of"),
        ("weight_scale", torch.ones(63, 1), r"q_proj.weight_scale \(63, 1\) does not fit the weight's \(64, 48\)"),
        ("weight_scale", torch.ones(2, 2), r"q_proj.weight_scale \(2, 2\) does not fit the weight's \(64, 48\)"),
        ("weight_scale", torch.ones(64, 1).to(FP8), r"q_proj.weight_scale \(64, 1\) does not fit"),
        ("weight_zero_point", torch.zeros(64, 1), "unexpected: .*q_proj.weight_zero_point"),
    ],
)
def test_scales_that_cannot_be(
    anywhere: None, name: str, tensor: torch.Tensor | None, reason: str, tmp_path: Path
) -> None:
    write_fp8(tmp_path, "compressed-tensors, rows")
    edit_tensors(tmp_path / WEIGHTS, **{f"{LAYER}.self_attn.q_proj.{name}": tensor})
    with pytest.raises(ValueError, match=reason):
        load_model(tmp_path)


def test_norms_in_fp8_are_refused(anywhere: None, tmp_path: Path) -> None:
    write_fp8(tmp_path, "fbgemm_fp8")
    edit_tensors(tmp_path / WEIGHTS, model__norm__weight=torch.ones(48).to(FP8))
    with pytest.raises(ValueError, match=r"model.norm.weight \(48,\) is F8_E4M3, which only weights of projections"):
        load_model(tmp_path)


def test_fp8_in_a_checkpoint_that_does_not_say_so_is_refused(anywhere: None, tmp_path: Path) -> None:
    write_fp8(tmp_path, "fbgemm_fp8")
    edit_json(tmp_path / CONFIG, quantization_config=...)
    with pytest.raises(ValueError, match="is of type F8_E4M3; supported: F64, F32, F16, BF16"):
        load_model(tmp_path, quantization="fp8")


GROUP = compressed_tensors("channel")["config_groups"]["group_0"]


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "pack-quantized"},
        {"config_groups": {"a": GROUP, "b": {**GROUP, "weights": {**GROUP["weights"], "num_bits": 4}}}},
        {"config_groups": {"a": {**GROUP, "weights": {**GROUP["weights"], "strategy": "group"}}}},
        {"config_groups": {"a": {**GROUP, "weights": {**GROUP["weights"], "symmetric": False}}}},
        {"config_groups": {"a": {**GROUP, "weights": None}}},
        {"config_groups": {}},
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [128, 0]},
        {"quant_method": "fp8", "weight_block_size": "128x128"},
        {"quant_method": "fp8", "fmt": "e5m2"},
    ],
)
def test_other_kinds_are_refused(anywhere: None, changes: dict[str, object], tmp_path: Path) -> None:
    write_fp8(tmp_path, "compressed-tensors, rows")
    edit_json(tmp_path / CONFIG, quantization_config={**compressed_tensors("channel"), **changes})
    with pytest.raises(ValueError, match=r"config\.json: the weights are quantized with '(compressed-tensors|fp8)'"):
        load_model(tmp_path)


def test_sizes_that_tensor_cores_do_not_take_are_named(anywhere: None, tmp_path: Path) -> None:
    build("llama", tmp_path)
    edit_json(tmp_path / CONFIG, intermediate_size=84, num_key_value_heads=2, head_dim=10)
    with pytest.raises(ValueError) as raised:
        load_config(tmp_path, quantization="fp8")
    for reason in (
        "fp8 weights need sizes that are multiples of 16, and intermediate_size is 84",
        "num_query_heads x head_dim is 40",
        "2 x num_kv_heads x head_dim is 40",
    ):
        assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "reason"),
    [
        ("cuda:1", (8, 9), torch.bfloat16, None),
        ("cuda:1", (9, 0), torch.bfloat16, None),
        ("cuda:1", (10, 3), torch.bfloat16, None),
        ("cuda:1", (8, 6), torch.bfloat16, r"8\.9 or more \(Ada, Hopper or newer\), and An A10 \(cuda:1\) has 8\.6"),
        ("cuda:1", (9, 0), torch.float16, "goes with dtype='bfloat16', not float16"),
        ("cpu", (9, 0), torch.bfloat16, "and the device is cpu"),
    ],
)
def test_where_fp8_runs(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    capability: tuple[int, int],
    dtype: torch.dtype,
    reason: str | None,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "An A10")
    said = unfit(torch.device(device), dtype)
    assert (said is None) == (reason is None)
    if reason is None:
        return
    build("qwen3", tmp_path / "plain")
    with pytest.raises(ValueError, match=rf"^quantization='fp8': fp8 .*{reason}; leave it out$"):
        load_model(tmp_path / "plain", device=device, dtype=dtype, quantization="fp8")


def test_an_unknown_quantization(tmp_path: Path) -> None:
    build("llama", tmp_path)
    known = "fp8, fp8-block, awq, gptq, int4, int8, nvfp4, mxfp4"
    with pytest.raises(ValueError, match=f"quantization='int3' is not one of {known}"):
        load_model(tmp_path, quantization="int3")
    with pytest.raises(
        ValueError, match=r"quantization='awq': the files of .* are not quantized and are loaded as they are"
    ):
        load_model(tmp_path, quantization="awq")
