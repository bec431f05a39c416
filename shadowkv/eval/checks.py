"""Checks of flags, as far as they are possible without the model."""

from __future__ import annotations

import argparse

from shadowkv.eval.records.vary import Variation
from shadowkv.kvcache.presets import preset

COUNTS = (
    *("samples", "batch", "needles", "turns", "num_concurrent"),
    *("prompts", "prompt_tokens", "new_tokens", "measure_every"),
)
"""Flags that must be at least 1."""


def check(args: argparse.Namespace) -> None:
    """Raises ValueError listing everything that is not valid."""
    bad = [f"--length {length} must be at least 1" for length in getattr(args, "length", ()) if length < 1]
    bad += [
        f"--{name.replace('_', '-')} {value} must be at least 1"
        for name in COUNTS
        if (value := getattr(args, name, 1)) is not None and value < 1
    ]
    bad += [f"--depths {depth} is not in [0, 100]" for depth in getattr(args, "depths", ()) if not 0 <= depth <= 100]
    served = getattr(args, "base_url", None)
    if served and len(args.kv or ()) > 1:
        bad.append(f"--kv {' '.join(args.kv)}: a server has one policy")
    for name in ("budget", "vary"):
        if served and getattr(args, name):
            bad.append(f"--{name} has no meaning with --base-url: the server has the cache")
    if getattr(args, "unquantized_reference", False) and args.quantization is None:
        bad.append("--unquantized-reference has no meaning without --quantization")
    for kv in () if served else args.kv or ():
        try:
            preset(kv)
        except ValueError as error:
            bad.append(f"--kv {kv}: {error}")
    if bad:
        raise ValueError("; ".join(bad))


def variation(text: str) -> Variation:
    """A field and its values."""
    try:
        return Variation.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
