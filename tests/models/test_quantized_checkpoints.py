"""Quantised checkpoints are refused by their method's name before a weight is read; what asks for nothing loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bad_files import Serve, assert_refused, edit_json, write_directory
from fp8_files import compressed_tensors

from shadowkv.models import load_config, load_model

CONFIGS, REMEDY = "config.json", "use the unquantised checkpoint, or a GGUF file"
FP8 = "fp8 loads as fp8, fbgemm_fp8 or compressed-tensors' float-quantized alone"
HARDWARE = "weights are quantised in fp8, and fp8 needs a GPU of compute capability 8.9 or more (Ada, Hopper or newer)"

NAMED = [
    "awq",
    "gptq",
    "bitsandbytes",
    "compressed-tensors",
    "mxfp4",
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
    "modelopt",
    "exl2",
    "of_next_year",
]
"""Any value of quant_method: there is no list of them to fall out of date."""

UNNAMED: dict[str, tuple[dict[str, Any], str]] = {
    "awq": ({"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}, "'awq'"),
    "gptq": ({"bits": 4, "group_size": 128, "desc_act": False, "sym": True}, "'gptq'"),
    "bitsandbytes": ({"load_in_4bit": True, "load_in_8bit": False}, "'bitsandbytes'"),
    "sparse": ({"sparsity_config": {"format": "sparse-bitmask"}}, "'compressed-tensors'"),
    "another": ({"bits": 4, "group_size": 64}, "does not name"),
}
FLOAT8: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fbgemm": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
    "compressed-tensors": compressed_tensors("channel"),
}
OTHER_FLOAT8: dict[str, dict[str, Any]] = {
    "compressed-tensors, of no groups": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "fp8 in another format": {"quant_method": "fp8", "fmt": "e5m2"},
}
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
    assert_refused(answer, str(model / CONFIGS), f"quantised with '{method}'")
    assert REMEDY in answer[1] and "fp8" not in answer[1]


@pytest.mark.parametrize("name", FLOAT8)
def test_fp8_needs_a_gpu_that_has_it(name: str, model: Path, serve: Serve) -> None:
    edit_json(model / CONFIGS, quantization_config=FLOAT8[name])
    for flags in ([], ["--load-format", "dummy"], ["--dtype", "bfloat16"]):
        answer = serve(model, *flags)
        assert_refused(answer, str(model), HARDWARE)
        assert "the device is cpu" in answer[1] and REMEDY in answer[1]
    answer = serve(model, "--quantization", "fp8")
    assert_refused(answer, "--quantization fp8", "the device is cpu; leave it out")


@pytest.mark.parametrize("name", OTHER_FLOAT8)
def test_fp8_of_other_kinds(name: str, model: Path, serve: Serve) -> None:
    edit_json(model / CONFIGS, quantization_config=OTHER_FLOAT8[name])
    answer, stated = serve(model), OTHER_FLOAT8[name]
    known = stated.get("quant_method") in ("fp8", "compressed-tensors")
    assert_refused(answer, CONFIGS, "this form of it is not known: {" if known else FP8)
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
    edit_json(model / CONFIGS, **{key: {"quantization_config": {"quant_method": "gptq", "bits": 4}}})
    assert_refused(serve(model), CONFIGS, "'gptq'")


SEPARATE: dict[str, tuple[dict[str, Any], str]] = {
    "quantize_config.json": (UNNAMED["gptq"][0], "'gptq'"),
    "quant_config.json": (UNNAMED["awq"][0], "'awq'"),
    "hf_quant_config.json": ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}, FP8),
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
    assert_refused(serve(model), CONFIGS, "quantised with")


def test_a_family_that_is_not_supported_either(model: Path, serve: Serve) -> None:
    """Its unquantised checkpoint would be no remedy."""
    edit_json(model / CONFIGS, model_type="gpt_oss", quantization_config={"quant_method": "mxfp4"})
    answer = serve(model)
    assert_refused(answer, CONFIGS, "'mxfp4'")
    assert "'gpt_oss' is not supported" in answer[1] and "use another model" in answer[1] and REMEDY not in answer[1]


def test_without_weights_too(model: Path, serve: Serve) -> None:
    """What could not be loaded is not planned, and not measured with random weights."""
    edit_json(model / CONFIGS, quantization_config={"quant_method": "awq"})
    assert_refused(serve(model, "--load-format", "dummy"), CONFIGS, "'awq'")
    with pytest.raises(ValueError, match="'awq'"):
        load_config(model)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", NOTHING)
def test_what_asks_for_nothing_loads(name: str, nested: bool, tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "whole")
    stated = {"quantization_config": NOTHING[name]}
    edit_json(directory / CONFIGS, **({"text_config": stated} if nested else stated))
    (directory / "quantize_config.json").write_text("{}")
    assert load_model(directory).config.hidden_size == 32
