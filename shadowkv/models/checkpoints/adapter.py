"""LoRA adapters in PEFT's format, merged into the weights while they load (arXiv:2106.09685).

A matrix can be int8 with one scale per row. The names of its tensors then end in ``weight`` and ``weight_scale``, as in
compressed-tensors. The project's own adapters are in int8, which takes a quarter of float32's bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shadowkv.models.checkpoints.files import ModelFileError, is_number, is_there, join_reasons, read_json
from shadowkv.models.checkpoints.safetensors_weights import DTYPES, open_safetensors, read_header
from shadowkv.models.checkpoints.stored_weight import Stored, dense

_NAME = re.compile(
    r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight(?P<scale>_scale)?$"
)
_INT8 = "I8"
_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "use_dora": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
}

_MAX_RANK, _MAX_ALPHA = 1 << 16, 1e9
_OTHER = "use an adapter of this model"


class Adapter:
    """Low-rank updates W' = W + scale · B·A of the modules that the adapter has matrices for. W [N, K] is a module's
    weight, and r is the adapter's rank.

    Args:
        directory: holds ``adapter_config.json`` and ``adapter_model.safetensors``.

    Attributes:
        pairs: module -> its matrices, ``A`` [r, K] and ``B`` [N, r].
        scale: factor of the products B·A.

    Raises FileNotFoundError for missing files and ModelFileError for adapters other than plain LoRA.
    """

    def __init__(self, directory: Path) -> None:
        config_file, weights_file = directory / "adapter_config.json", directory / "adapter_model.safetensors"
        for file in (config_file, weights_file):
            if not is_there(file):
                raise FileNotFoundError(f"the adapter has no {file.name} in {directory}")
        config = read_json(config_file)
        wrong = _wrong_fields(config)
        if wrong:
            raise ModelFileError(config_file, join_reasons(wrong))
        rank, targeted = config["r"], config.get("target_modules")
        reasons = [f"{key}={config[key]!r} is not supported" for key in _PLAIN if config.get(key) not in _PLAIN[key]]
        modules: dict[str, dict[str, tuple[int, ...]]] = {}
        header = read_header(weights_file, (*DTYPES, _INT8))
        for name, (shape, dtype) in header.items():
            match = _NAME.match(name)
            if match is None:
                reasons.append(f"tensor {name} is not a LoRA matrix")
            elif match["scale"] is None:
                modules.setdefault(match["module"], {})[match["side"]] = shape
                scale = header.get(f"{name}_scale")
                if dtype == _INT8 and (scale is None or scale[0] != (*shape[:1], 1) or scale[1] == _INT8):
                    reasons.append(f"{name} is int8 and has no scale for each of its {shape[0]} rows")
            elif header.get(name.removesuffix("_scale"), ((), ""))[1] != _INT8:
                reasons.append(f"{name} belongs to no int8 matrix")
        for module, shapes in modules.items():
            if len(shapes) != 2:
                reasons.append(f"{module} has only one of lora_A and lora_B")
            elif any(len(shape) != 2 for shape in shapes.values()):
                reasons.append(f"{module} has matrices of shapes {shapes['A']} and {shapes['B']}")
            elif shapes["A"][0] != rank or shapes["B"][1] != rank:
                reasons.append(f"{module} has rank {shapes['A'][0]}, the config says {rank}")
            if isinstance(targeted, list) and not any(module == end or module.endswith("." + end) for end in targeted):
                reasons.append(f"{module} is not among target_modules")
        if not modules:
            reasons.append("it has no LoRA matrices")
        if reasons:
            remedy = "use a plain LoRA adapter, with weights for everything that its config names"
            raise ModelFileError(directory, f"the adapter cannot be used: {join_reasons(reasons)}", remedy)
        self._directory, self.pairs = directory, _read_pairs(weights_file)
        self.scale: float = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ModelFileError if the matrices do not fit a model's weights."""
        unknown = []
        for module, pair in self.pairs.items():
            update, needed = (pair["B"].shape[0], pair["A"].shape[1]), shapes.get(f"{module}.weight")
            if needed is None:
                unknown.append(module)
            elif update != needed:
                raise ModelFileError(
                    self._directory, f"the adapter's {module} is {update}, the model's {needed}", _OTHER
                )
        if unknown:
            reason = f"the adapter has modules that the model lacks: {join_reasons(sorted(unknown))}"
            raise ModelFileError(self._directory, reason, _OTHER)

    @property
    def changed(self) -> list[str]:
        """Names of the weights that the adapter changes."""
        return [f"{module}.weight" for module in self.pairs]

    def merged(self, tensors: Iterator[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
        """Yields the weights. The adapter's updates are added in float32. Call ``check`` first."""
        for name, stored in tensors:
            pair = self.pairs.get(name.removesuffix(".weight"))
            if pair is not None and name.endswith(".weight"):
                stored = torch.add(dense(stored).float(), pair["B"].float() @ pair["A"].float(), alpha=self.scale)
            yield name, stored


def _wrong_fields(config: dict[str, Any]) -> list[str]:
    """Returns a reason for every invalid field, among the fields that the scale or the matrices need."""
    rank, alpha, targeted = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    names = targeted if isinstance(targeted, list) else [] if targeted is None else [targeted]
    fine = {
        "peft_type": config.get("peft_type") == "LORA",
        "r": type(rank) is int and 0 < rank <= _MAX_RANK,
        "lora_alpha": is_number(alpha, -_MAX_ALPHA, _MAX_ALPHA),
        "use_rslora": config.get("use_rslora") in (None, False, True) and type(config.get("use_rslora")) is not int,
        "target_modules": all(isinstance(name, str) for name in names),
    }
    wanted_values = {
        "peft_type": "'LORA'",
        "r": f"a whole number from 1 to {_MAX_RANK}",
        "lora_alpha": "a number",
        "use_rslora": "true or false",
        "target_modules": "a text or a list of texts",
    }
    return [f"{key}={str(config.get(key))[:60]} is not {wanted_values[key]}" for key, good in fine.items() if not good]


def _read_pairs(file: Path) -> dict[str, dict[str, Tensor]]:
    pairs: dict[str, dict[str, Tensor]] = {}
    with open_safetensors(file) as opened:
        for name in opened.keys():  # noqa: SIM118 (not a mapping)
            match = _NAME.match(name)
            assert match is not None
            if match["scale"] is None:
                matrix = opened.get_tensor(name)
                if matrix.dtype == torch.int8:
                    matrix = matrix.float() * opened.get_tensor(f"{name}_scale").float()
                pairs.setdefault(match["module"], {})[match["side"]] = matrix
    return pairs
