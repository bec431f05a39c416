"""Quantised checkpoints in a Hugging Face directory: what its JSON files say; fp8 loads, others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shadowkv.models.checkpoints.files import (
    OTHER_MODEL,
    ModelFileError,
    in_words,
    is_there,
    read_json,
    unsupported,
)
from shadowkv.models.checkpoints.fp8 import FP8Format, fp8_format
from shadowkv.models.families.registry import FAMILIES

SEPARATE_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Where GPTQ, AWQ and ModelOpt put it before it had a place in config.json."""

_PLACE = "quantization_config"
_KEYS = {"quantization": "mlx", _PLACE: None, "compression_config": "compressed-tensors"}
"""Its names in config.json -> the method that uses the name without stating the method."""

_NESTED = ("text_config", "llm_config", "language_config")
_DTYPE_KEYS = ("dtype", "torch_dtype")
_LOAD_IN = ("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit")
_TELLING = {
    "awq": ("w_bit", "q_group_size"),
    "gptq": ("desc_act", "damp_percent", "true_sequential"),
    "bitsandbytes": _LOAD_IN,
    "modelopt": ("quant_algo", "producer"),
    "compressed-tensors": ("config_groups", "sparsity_config"),
}
"""Method -> fields that only its configs have, for old ones that do not name it."""

LOADS = "fp8, fbgemm_fp8 or compressed-tensors' float-quantized"
REMEDY = "use the unquantised checkpoint, or a GGUF file of the model where there is one"


def read_quantization(file: Path, hf: Mapping[str, Any]) -> FP8Format | None:
    """How a checkpoint is quantised, None if it is not.

    Raises ModelFileError, naming the method and the file that states it, for a method that cannot be loaded.

    Args:
        file: its config.json; older repositories have a separate file beside it.
        hf: content of ``file``.
    """
    kind = fp8_format(hf.get(_PLACE))
    if kind is not None:
        hf = {key: value for key, value in hf.items() if key != _PLACE}
    nested = {f"{name}.": hf[name] for name in _NESTED if isinstance(hf.get(name), Mapping)}
    for prefix, fields in {"": hf, **nested}.items():
        for key, writer in _KEYS.items():
            _refuse(file, f"{prefix}{key}", fields.get(key), hf.get("model_type"), writer)
    if file.name == "config.json":
        for other in (file.with_name(name) for name in SEPARATE_FILES):
            if is_there(other):
                _refuse(other, "its content", read_json(other), hf.get("model_type"))
    return kind


def _refuse(file: Path, name: str, stated: Any, model_type: Any, writer: str | None = None) -> None:
    if stated is None:
        return
    if not isinstance(stated, Mapping):
        raise ModelFileError(file, f"{name}={str(stated)[:60]} is not an object", REMEDY)
    # ModelOpt's own file has all of it one level deeper.
    nested = stated.get("quantization")
    stated = {**stated, **(nested if isinstance(nested, Mapping) else {})}
    if not _asks_for_something(stated):
        return
    method = stated.get("quant_method") or _guess(stated) or writer
    how = f"with {str(method)[:60]!r}" if method else f"in a way that {name} does not name"
    which = f"fp8 loads as {LOADS} alone" if _is_fp8(stated) else "such checkpoints are not supported"
    if _is_fp8(stated) and method in ("fp8", "compressed-tensors"):
        form = {key: stated[key] for key in ("fmt", "weight_block_size", "config_groups") if key in stated}
        which = f"this form of it is not known: {str(form)[:200]}"
    reasons, remedy = [f"the weights are quantised {how}: {which}"], REMEDY
    if model_type not in FAMILIES:
        reasons.append(unsupported("model_type", str(model_type), FAMILIES))
        remedy = OTHER_MODEL
    raise ModelFileError(file, in_words(reasons), remedy)


def _asks_for_something(stated: Mapping[str, Any]) -> bool:
    set_fields = {key for key, value in stated.items() if value is not None} - set(_DTYPE_KEYS)
    # bitsandbytes' defaults, which some tools write into every config.
    switched = [stated[key] for key in _LOAD_IN if key in stated]
    return bool(set_fields) and not (switched and not any(switched))


def _guess(stated: Mapping[str, Any]) -> str | None:
    return next((method for method, keys in _TELLING.items() if any(key in stated for key in keys)), None)


def _is_fp8(stated: Mapping[str, Any]) -> bool:
    return (
        stated.get("quant_method") in ("fp8", "fbgemm_fp8")
        or stated.get("format") == "float-quantized"  # compressed-tensors
        or stated.get("quant_algo") == "FP8"  # ModelOpt
    )
