"""Quantized checkpoints of unknown formats are refused by name before a weight is read; what asks for nothing loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bad_files import Serve, assert_refused, edit_json, write_directory
from fp8_files import compressed_tensors

from shadowkv.models import load_config, load_model

CONFIGS, REMEDY = "config.json", "use the unquantized checkpoint, or a GGUF file"
KNOWN = (
    "this format is not supported; supported formats: awq, gptq, compressed-tensors, fp8, fbgemm_fp8, modelopt, mxfp4"
)

NAMED = [
    "bitsandbytes",
    "nvfp4",
    "torchao",
    "quanto",
    "hqq",
    "eetq",
    "aqlm",
    "vptq",
    "spqr",
    "higgs",
    "bitnet",
    "quark",
    "auto-round",
    "exl2",
    "of_next_year",
]
"""Any other value of quant_method: there is no list of them to fall out of date."""

UNNAMED: dict[str, tuple[dict[str, Any], str]] = {
    "awq": (
        {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMV"},
        "'awq': version='gemv' is not",
    ),
    "gptq": ({"bits": 3, "group_size": 128, "desc_act": False, "sym": True}, "'gptq': bits=3 is not 4 or 8"),
    "bitsandbytes": ({"load_in_4bit": True, "load_in_8bit": False}, "'bitsandbytes'"),
    "sparse": ({"sparsity_config": {"format": "sparse-bitmask"}}, "'compressed-tensors'"),
    "another": ({"bits": 4, "group_size": 64}, "does not name"),
}
INTEGERS = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": True}


def packed(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": INTEGERS | weights}
    return compressed_tensors("channel") | {"format": "pack-quantized", "config_groups": {"group_0": group}}


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "awq of 3 bits": ({"quant_method": "awq", "bits": 3}, "bits=3 is not 4"),
    "awq of groups of what": ({"quant_method": "awq", "bits": 4, "group_size": "all"}, "group_size=all is not"),
    "awq of other names": ({"quant_method": "awq", "modules_to_not_convert": [4]}, "is not a list of names"),
    "gptq for one kernel": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "='marlin' is not one of gptq, gptq_v2",
    ),
    "compressed-tensors, of no groups": (
        {"quant_method": "compressed-tensors", "format": "float-quantized"}, "config_groups=None has no groups",
    ),
    "3 bits": (packed(num_bits=3), "config_groups.group_0: pack-quantized of 3-bit int by group is not int of 4 or 8"),
    "no size": (packed(group_size=None), "group_size=None is not a number of columns"),
    "tokens": (packed(strategy="token"), "by token is not int of 4 or 8 bits by tensor, channel, group"),
    "other format": (
        packed() | {"format": "marlin-24"},
        "supported formats: pack-quantized, int-quantized, float-quantized, nvfp4-pack-quantized, mxfp4-",
    ),
    "sparse": (packed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "is not dense"),
    "rotated": (packed() | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config has transforms"),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        "quant_algo='W4A8_AWQ' is not one of NVFP4, W4A16_NVFP4, FP8, FP8_PER_CHANNEL_PER_TOKEN",
    ),
    "fp8 in another format": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt=e5m2 is neither e4m3 nor float8_e4m3fn"),
    "fp8 of odd blocks": ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size=[128] is not two"),
}  # fmt: skip
NOTHING: dict[str, Any] = {
    "null": None,
    "empty": {},
    "dtype": {"dtype": "bfloat16"},
    "torch_dtype": {"torch_dtype": "float16", "quant_method": None},
    "bitsandbytes, switched off": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": False,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "fp4",
        "llm_int8_threshold": 6.0,
    },
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A good model without its weights: a refusal cannot come from them."""
    directory = write_directory(tmp_path / "tiny")
    (directory / "model.safetensors").unlink()
    return directory


@pytest.mark.parametrize("method", NAMED)
def test_the_method_is_named(method: str, model: Path, serve: Serve) -> None:
    edit_json(model / CONFIGS, quantization_config={"quant_method": method, "bits": 4})
    answer = serve(model)
    assert_refused(answer, str(model / CONFIGS), f"quantized with '{method}': {KNOWN}")
    assert REMEDY in answer[1]


def test_fp8_by_flag_needs_a_gpu_that_has_it(model: Path, serve: Serve) -> None:
    answer = serve(model, "--quantization", "fp8")
    assert_refused(answer, "--quantization fp8", "the device is cpu; leave it out")


@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds_of_known_methods(name: str, model: Path, serve: Serve) -> None:
    stated, reason = OTHERS[name]
    edit_json(model / CONFIGS, quantization_config=stated)
    answer = serve(model)
    assert_refused(answer, CONFIGS, reason)
    assert REMEDY in answer[1]


@pytest.mark.parametrize("name", UNNAMED)
def test_a_method_that_is_not_stated(name: str, model: Path, serve: Serve) -> None:
    content, reason = UNNAMED[name]
    edit_json(model / CONFIGS, quantization_config=content)
    assert_refused(serve(model), CONFIGS, reason)


@pytest.mark.parametrize(
    ("key", "content", "method"),
    [("quantization", {"bits": 4, "group_size": 64}, "mlx"), ("compression_config", {"x": 1}, "compressed-tensors")],
)
def test_other_names_of_the_field(key: str, content: dict[str, Any], method: str, model: Path, serve: Serve) -> None:
    edit_json(model / CONFIGS, **{key: content})
    assert_refused(serve(model), CONFIGS, f"'{method}'")


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_one_of_the_language_model_inside(key: str, model: Path, serve: Serve) -> None:
    edit_json(model / CONFIGS, **{key: {"quantization_config": {"quant_method": "hqq", "bits": 4}}})
    assert_refused(serve(model), CONFIGS, "'hqq'")


SEPARATE: dict[str, tuple[dict[str, Any], str]] = {
    "quantize_config.json": (UNNAMED["gptq"][0], "'gptq'"),
    "quant_config.json": (UNNAMED["awq"][0], "'awq'"),
    "hf_quant_config.json": (
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "INT4_AWQ"}},
        "'modelopt': quant_algo='INT4_AWQ' is not one of NVFP4",
    ),
}


@pytest.mark.parametrize("file", SEPARATE)
def test_a_file_of_its_own(file: str, model: Path, serve: Serve) -> None:
    content, reason = SEPARATE[file]
    (model / file).write_text(json.dumps(content))
    assert_refused(serve(model), str(model / file), reason)
    (model / file).write_text("{")
    assert_refused(serve(model), str(model / file), "is not JSON")


@pytest.mark.parametrize("value", ["awq", 4, ["awq"], True, 0, ""])
def test_what_is_no_object(value: Any, model: Path, serve: Serve) -> None:
    edit_json(model / CONFIGS, quantization_config=value)
    assert_refused(serve(model), CONFIGS, "quantization_config")


@pytest.mark.parametrize("method", [4, ["awq"], {"a": 1}, "x" * 10_000, "a\nb\x1b[2J", True])
def test_a_method_that_is_no_name(method: Any, model: Path, serve: Serve) -> None:
    edit_json(model / CONFIGS, quantization_config={"quant_method": method})
    assert_refused(serve(model), CONFIGS, "quantized with")


def test_a_family_that_is_not_supported_either(model: Path, serve: Serve) -> None:
    """Its unquantized checkpoint would be no remedy."""
    for method in ("mxfp4", "hqq"):
        edit_json(model / CONFIGS, model_type="deepseek_v3", quantization_config={"quant_method": method})
        answer = serve(model)
        assert_refused(answer, CONFIGS, "'deepseek_v3' is not supported")
        assert "use another model" in answer[1] and REMEDY not in answer[1]
        assert ("'hqq'" in answer[1]) == (method == "hqq")


def test_without_weights_too(model: Path, serve: Serve) -> None:
    """What could not be loaded is not planned, and not measured with random weights."""
    edit_json(model / CONFIGS, quantization_config={"quant_method": "hqq"})
    assert_refused(serve(model, "--load-format", "dummy"), CONFIGS, "'hqq'")
    with pytest.raises(ValueError, match="'hqq'"):
        load_config(model)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", NOTHING)
def test_what_asks_for_nothing_loads(name: str, nested: bool, tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "whole")
    stated = {"quantization_config": NOTHING[name]}
    edit_json(directory / CONFIGS, **({"text_config": stated} if nested else stated))
    (directory / "quantize_config.json").write_text("{}")
    assert load_model(directory).config.hidden_size == 32
