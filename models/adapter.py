"""LoRA adapters in PEFT's format, merged into the weights while they load (arXiv:2106.09685)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

_NAME = re.compile(r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight$")
_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "use_dora": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
}


class Adapter:
    """W' = W + scale · B·A for every module that the adapter has a pair for.

    Args:
        directory: holds ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises FileNotFoundError for missing files and ValueError, with every reason, for adapters other than plain LoRA.
    """

    def __init__(self, directory: Path) -> None:
        config_file, weights_file = directory / "adapter_config.json", directory / "adapter_model.safetensors"
        for file in (config_file, weights_file):
            if not file.exists():
                raise FileNotFoundError(f"the adapter has no {file.name} in {directory}")
        config = json.loads(config_file.read_text())
        pairs: dict[str, dict[str, Tensor]] = {}
        reasons = []
        if config.get("peft_type") != "LORA":
            reasons.append(f"peft_type={config.get('peft_type')!r} is not 'LORA'")
        reasons += [
            f"{key}={config[key]!r} is not supported"
            for key, accepted in _PLAIN.items()
            if config.get(key) not in accepted
        ]
        for name, tensor in load_file(weights_file).items():
            match = _NAME.match(name)
            if match is None:
                reasons.append(f"tensor {name} is no LoRA matrix")
            else:
                pairs.setdefault(match["module"], {})[match["side"]] = tensor
        wanted = config.get("target_modules")
        for module, pair in pairs.items():
            if len(pair) != 2:
                reasons.append(f"{module} has only one of lora_A and lora_B")
            elif pair["A"].shape[0] != config["r"] or pair["B"].shape[1] != config["r"]:
                reasons.append(f"{module} has rank {pair['A'].shape[0]}, the config says {config['r']}")
            if isinstance(wanted, list) and not any(module == end or module.endswith("." + end) for end in wanted):
                reasons.append(f"{module} is not among target_modules")
        if reasons:
            raise ValueError(
                f"the adapter in {directory} cannot be used:\n" + "\n".join(f"  - {reason}" for reason in reasons)
            )
        self._pairs = pairs
        root = math.sqrt(config["r"]) if config.get("use_rslora") else config["r"]
        self.scale: float = config["lora_alpha"] / root

    def merged(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The stream with the adapter added, in float32; raises ValueError at its end if a pair matched nothing."""
        left = set(self._pairs)
        for name, tensor in tensors:
            module = name.removesuffix(".weight")
            if module in left:
                left.remove(module)
                pair = self._pairs[module]
                update = pair["B"].float() @ pair["A"].float()
                if update.shape != tensor.shape:
                    raise ValueError(
                        f"the adapter's {module} is {tuple(update.shape)}, the model's {tuple(tensor.shape)}"
                    )
                tensor = torch.add(tensor.float(), update, alpha=self.scale)
            yield name, tensor
        if left:
            raise ValueError("the adapter has modules that the model lacks: " + ", ".join(sorted(left)))
