"""What settings of loading a model can be: for ``models``, and for flags, which are named without PyTorch."""

from __future__ import annotations

import argparse
import json
from typing import Any

LOAD_FORMATS = ("auto", "dummy")
QUANTIZATIONS = ("fp8", "fp8-block", "awq", "gptq", "int8", "nvfp4", "mxfp4")
"""The first is arithmetic in 8 bits, for any files; the others say what random weights are in, and plans."""

DTYPES = ("auto", "float32", "bfloat16", "float16")
OVERRIDES_HELP = "entries that replace those of the model's config.json, as in vLLM; of GGUF files by the same names"


def parse_overrides(text: str) -> dict[str, Any]:
    """``--hf-overrides`` as given on a command line; raises ArgumentTypeError where it is no JSON object."""
    wanted = """'{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}'"""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON, as {wanted} is: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object, as {wanted} is")
    return value
