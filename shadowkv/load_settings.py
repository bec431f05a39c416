"""Valid values of settings for loading a model. This module does not import PyTorch, so that flags are checked
quickly."""

from __future__ import annotations

import argparse
import json
import re
from decimal import Decimal
from typing import Any

LOAD_FORMATS = ("auto", "safetensors", "dummy")
DEQUANTIZED = "none"
QUANTIZATIONS = ("fp8", "fp8-block", "awq", "gptq", "int4", "int8", "nvfp4", "mxfp4", DEQUANTIZED)
"""Values of ``quantization``. ``fp8`` converts weights of any format to 8 bits at load. ``none`` dequantizes weights of
any format. The other values choose the format of random weights, and of weights in memory plans."""

DTYPES = ("auto", "float32", "bfloat16", "float16", "half", "float")
"""Values of ``dtype``. ``half`` and ``float`` are other names of float16 and float32, as in vLLM and PyTorch."""
STATE_DTYPES = ("auto", "float32", "bfloat16")
"""Values of ``mamba_ssm_cache_dtype``; ``auto`` is float32."""
ATTENTION_BACKENDS = ("auto", "shadowkv", "flashinfer", "flash-attn")
"""Values of ``attention_backend``. ``auto`` uses the kernels that were fastest in measurements. ``shadowkv`` uses only
this project's kernels. The other values name packages, whose kernels are used wherever they can run."""

_MULTIPLES = {letter: 10 ** (3 * power) for power, letter in enumerate("kmgt", 1)} | {
    letter: 2 ** (10 * power) for power, letter in enumerate("KMGT", 1)
}


def parse_count(text: str) -> int:
    """Parses a number as vLLM does: ``8k`` is 8000, ``25.6k`` is 25600 and ``8K`` is 8192. Raises ArgumentTypeError."""
    found = re.fullmatch(r"\s*(-?\d+)(\.\d+)?([kmgtKMGT]?)\s*", text)
    if found is None or (found[2] and not found[3].islower()):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, such as 8192, 8k (8000) or 8K (8192)")
    value = Decimal(found[1] + (found[2] or "")) * _MULTIPLES.get(found[3], 1)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(value)


def parse_attention_backend(text: str) -> str:
    """Parses ``--attention-backend``, also in vLLM's spelling, ``FLASH_ATTN``. Raises ArgumentTypeError."""
    name = text.lower().replace("_", "-")
    if name not in ATTENTION_BACKENDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(ATTENTION_BACKENDS)}")
    return name


def parse_object(text: str) -> dict[str, Any]:
    """Parses a JSON object of a command line. Raises ArgumentTypeError."""
    return _object(text, """'{"temperature": 0.5}'""")


def parse_overrides(text: str) -> dict[str, Any]:
    """Parses ``--hf-overrides``. Raises ArgumentTypeError if it is no JSON object."""
    return _object(text, """'{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}'""")


def parse_speculative_config(text: str) -> dict[str, Any]:
    """Parses ``--speculative-config``. Raises ArgumentTypeError if it is no JSON object."""
    return _object(text, """'{"method": "suffix", "num_speculative_tokens": 8}'""")


def _object(text: str, wanted: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON, such as {wanted}: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object, such as {wanted}")
    return value
