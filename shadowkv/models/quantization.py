"""Finds the quantization config of a Hugging Face directory in its JSON files, and the format that reads the
weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shadowkv.models.checkpoints.files import (
    OTHER_MODEL,
    ModelFileError,
    is_there,
    join_reasons,
    read_json,
    unsupported,
)
from shadowkv.models.checkpoints.quantized.format import Format
from shadowkv.models.checkpoints.quantized.registry import format_of
from shadowkv.models.registry import FAMILIES

_PLACE = "quantization_config"
_KEYS = {_PLACE: None, "compression_config": "compressed-tensors", "quantization": "mlx"}
"""Key of the quantization config in config.json -> the method of configs that do not state one; None if unknown."""

SEPARATE_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Separate files of GPTQ's, AWQ's and ModelOpt's quantization configs; read only if config.json has none."""

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
"""Method -> fields that only its configs have, for old configs that do not state the method."""

REMEDY = "use the unquantized checkpoint, or a GGUF file of the model where there is one"


def read_quantization(file: Path, hf: Mapping[str, Any]) -> Format | None:
    """The format of a checkpoint; None if it is not quantized.

    Raises ModelFileError for unsupported formats. The error names the method and the file that states it.

    Args:
        file: the checkpoint's config.json. In older repositories a separate file beside it has the quantization config.
        hf: content of ``file``.
    """
    nested = {f"{name}.": hf[name] for name in _NESTED if isinstance(hf.get(name), Mapping)}
    found = None
    for prefix, fields in {"": hf, **nested}.items():
        for key, writer in _KEYS.items():
            format = _read(file, f"{prefix}{key}", fields.get(key), hf.get("model_type"), writer)
            found = found or format
    if found is None and file.name == "config.json":
        for other in (file.with_name(name) for name in SEPARATE_FILES):
            if is_there(other):
                found = found or _read(other, "its content", read_json(other), hf.get("model_type"))
    return found


def _read(file: Path, name: str, stated: Any, model_type: Any, writer: str | None = None) -> Format | None:
    if stated is None:
        return None
    if not isinstance(stated, Mapping):
        raise ModelFileError(file, f"{name}={str(stated)[:60]} is not an object", REMEDY)
    # ModelOpt's separate file has the config one level deeper, and so do old configs of compressed-tensors.
    for key in ("quantization", _PLACE):
        deeper = stated.get(key)
        stated = {**stated, **(deeper if isinstance(deeper, Mapping) else {})}
    if not _asks_for_something(stated):
        return None
    method = stated.get("quant_method") or _guess(stated) or writer
    how = f"with {str(method)[:60]!r}" if method else f"in a way that {name} does not name"
    try:
        format = format_of(str(method), stated)
        reasons = []
    except ValueError as error:
        reasons = [f"the weights are quantized {how}: {error}"]
    remedy = REMEDY
    if model_type not in FAMILIES:
        reasons.append(unsupported("model_type", str(model_type), FAMILIES))
        remedy = OTHER_MODEL
    if reasons:
        raise ModelFileError(file, join_reasons(reasons), remedy)
    return format


def _asks_for_something(stated: Mapping[str, Any]) -> bool:
    set_fields = {key for key, value in stated.items() if value is not None} - set(_DTYPE_KEYS)
    # bitsandbytes' defaults, which some tools write into every config, do not count.
    switched = [stated[key] for key in _LOAD_IN if key in stated]
    return bool(set_fields) and not (switched and not any(switched))


def _guess(stated: Mapping[str, Any]) -> str | None:
    return next((method for method, keys in _TELLING.items() if any(key in stated for key in keys)), None)
