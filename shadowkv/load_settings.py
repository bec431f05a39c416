"""What settings of loading a model can be: for ``models``, and for flags, which are named without PyTorch."""

from __future__ import annotations

import argparse
import json
import re
from decimal import Decimal
from typing import Any

LOAD_FORMATS = ("auto", "safetensors", "dummy")
DEQUANTISED = "none"
QUANTIZATIONS = ("fp8", "fp8-block", "awq", "gptq", "int4", "int8", "nvfp4", "mxfp4", DEQUANTISED)
"""The first is arithmetic in 8 bits, for any files, with the last weights are dequantised whatever files have them in;
the others say what random weights are in, and plans."""

DTYPES = ("auto", "float32", "bfloat16", "float16", "half", "float")
"""The last two are vLLM's, and PyTorch's, other names of float16 and float32."""
ATTENTION_BACKENDS = ("auto", "shadowkv", "flashinfer", "flash-attn")
"""How attention is chosen: as measured, without other packages, or by one of those wherever it serves."""

_MULTIPLES = {letter: 10 ** (3 * power) for power, letter in enumerate("kmgt", 1)} | {
    letter: 2 ** (10 * power) for power, letter in enumerate("KMGT", 1)
}


def parse_count(text: str) -> int:
    """A number as vLLM takes it: ``8k`` is 8000, ``25.6k`` is 25600 and ``8K`` is 8192; raises ArgumentTypeError."""
    found = re.fullmatch(r"\s*(-?\d+)(\.\d+)?([kmgtKMGT]?)\s*", text)
    if found is None or (found[2] and not found[3].islower()):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, as 8192, 8k (8000) and 8K (8192) are")
    value = Decimal(found[1] + (found[2] or "")) * _MULTIPLES.get(found[3], 1)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(value)


def parse_attention_backend(text: str) -> str:
    """``--attention-backend`` as given on a command line, in vLLM's spelling too: ``FLASH_ATTN``; raises
    ArgumentTypeError."""
    name = text.lower().replace("_", "-")
    if name not in ATTENTION_BACKENDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(ATTENTION_BACKENDS)}")
    return name


def parse_object(text: str) -> dict[str, Any]:
    """A JSON object as given on a command line; raises ArgumentTypeError."""
    return _object(text, """'{"temperature": 0.5}'""")


def parse_overrides(text: str) -> dict[str, Any]:
    """``--hf-overrides`` as given on a command line; raises ArgumentTypeError where it is no JSON object."""
    return _object(text, """'{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}'""")


def _object(text: str, wanted: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON, as {wanted} is: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object, as {wanted} is")
    return value
