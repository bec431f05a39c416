"""Chooses the backend of every op, once, when an engine is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

NAMES = (
    "add_rms_norm",
    "append_tokens",
    "attend_selected",
    "block_attention",
    "causal_attention",
    "chunk_mean_scores",
    "fetch_chunks",
    "find_outliers",
    "low_rank_basis",
    "merge_attention",
    "min_max_scores",
    "paged_attention",
    "project_latents",
    "quantise_rows",
    "rebuild_rows",
    "rms_norm",
    "rotate",
    "select_by_sketch",
    "select_top_chunks",
    "sign_scores",
    "silu_mul",
    "sketch_keys",
    "sketch_queries",
    "write_rows",
)

PREFERENCE = {"cuda": ("flashinfer", "cuda", "triton", "reference"), "cpu": ("cpu", "reference")}
"""Backends by device type, fastest first; an op has the files it has, ``reference.py`` always."""


class Ops:
    """Every op as an attribute, from the fastest backend that this device has.

    Args:
        device: where the ops will run.
        overrides: backend by op name, for tests and comparisons.

    Attributes:
        backends: backend by op name.
        synchronising: ops that make the host wait for the device, so that they cannot be captured in a graph.

    Raises:
        ValueError: an override names an unknown op or a backend that the op does not have.
    """

    def __init__(self, device: torch.device | str = "cpu", overrides: Mapping[str, str] | None = None) -> None:
        overrides = dict(overrides or {})
        unknown = sorted(set(overrides) - set(NAMES))
        if unknown:
            raise ValueError(f"unknown ops {', '.join(unknown)}; known: {', '.join(NAMES)}")
        kind = torch.device(device).type
        if kind not in PREFERENCE:
            raise ValueError(f"no ops for devices of type {kind!r}; use {' or '.join(PREFERENCE)}")
        self.backends: dict[str, str] = {}
        self.synchronising: list[str] = []
        for name in NAMES:
            wanted = (overrides[name],) if name in overrides else PREFERENCE[kind]
            function = next((found for backend in wanted if (found := self._load(name, backend))), None)
            if function is None:
                raise ValueError(f"op {name!r} has no backend {wanted[0]!r} here")
            setattr(self, name, function)

    def _load(self, name: str, backend: str) -> Callable[..., Any] | None:
        path = f"shadowkv.ops.{name}.{backend}"
        if find_spec(path) is None:
            return None
        module = import_module(path)
        available = getattr(module, "available", None)
        if available is not None and not available():
            return None
        self.backends[name] = backend
        if getattr(module, "SYNCHRONISES", False):
            self.synchronising.append(name)
        return getattr(module, name)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"no op {name!r}; known: {', '.join(NAMES)}")
