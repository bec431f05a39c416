"""Chooses the backend of every op, once, when an engine is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from shadowkv.ops.case import Case

NAMES = (
    "add_rms_norm",
    "append_block",
    "append_tokens",
    "apply_rope",
    "attend_blocks",
    "attend_coded",
    "attend_selected",
    "block_attention",
    "causal_attention",
    "causal_window_attention",
    "chunk_mean_scores",
    "dequantise_blocks",
    "fetch_chunks",
    "find_outliers",
    "low_rank_basis",
    "merge_attention",
    "min_max_scores",
    "paged_attention",
    "paged_window_attention",
    "project_latents",
    "quantise_rows",
    "quantise_tokens",
    "quantised_matmul",
    "ragged_attention",
    "rebuild_rows",
    "rms_norm",
    "sample_tokens",
    "scaled_matmul",
    "select_blocks",
    "select_by_sketch",
    "select_top_chunks",
    "sign_scores",
    "silu_mul",
    "sketch_keys",
    "sketch_queries",
    "whiten_rows",
    "write_rows",
)

PREFERENCE = {
    "cuda": ("cuda", "cuda_fp8", "cuda_mixed", "cuda_selected", "triton", "triton_selected", "reference"),
    "cpu": ("cpu", "reference"),
}
"""Backends by device type, fastest first; an op need not have all of them, but always has ``reference.py``."""


class Ops:
    """Every op as an attribute, from the fastest backend that this device has and that supports the case.

    A backend may define ``available()``, whether it was built and runs here, and ``supports(case)``, the reasons why it
    cannot serve a case, empty if it can. Once chosen, it handles the arguments of each call or raises.

    Args:
        device: where the ops will run.
        case: what they will be called with; None skips the check of what backends support.
        overrides: backend by op name, for tests and comparisons.

    Attributes:
        called: ops of the case; all ops without a case.
        backends: backend by op name.
        reasons: faster backends of each op that are not used, and why: ``name: reason``.
        synchronising: those of ``called`` that make the host wait for the device, so that they cannot be captured in a
            graph.

    Raises:
        ValueError: an override names an unknown op, or a backend that the op does not have or that cannot serve.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        case: Case | None = None,
        overrides: Mapping[str, str] | None = None,
    ) -> None:
        overrides = dict(overrides or {})
        unknown = sorted(set(overrides) - set(NAMES))
        if unknown:
            raise ValueError(f"unknown ops {', '.join(unknown)}; known: {', '.join(NAMES)}")
        kind = torch.device(device).type
        if kind not in PREFERENCE:
            raise ValueError(f"no ops for devices of type {kind!r}; use {' or '.join(PREFERENCE)}")
        self.case, self.called = case, frozenset(NAMES) if case is None else case.ops
        self.backends: dict[str, str] = {}
        self.reasons: dict[str, list[str]] = {}
        self.synchronising: list[str] = []
        for name in NAMES:
            self._choose(name, (overrides[name],) if name in overrides else PREFERENCE[kind])

    def _choose(self, name: str, backends: tuple[str, ...]) -> None:
        told = self.reasons[name] = []
        for backend in backends:
            path = f"shadowkv.ops.{name}.{backend}"
            if find_spec(path) is None:
                continue
            module = import_module(path)
            available = getattr(module, "available", lambda: True)()
            reasons = [] if available else ["not built, or does not run here"]
            if not reasons and self.case is not None and name in self.called:
                reasons = getattr(module, "supports", lambda case: [])(self.case)
            if reasons:
                told.append(f"{backend}: {'; '.join(reasons)}")
                continue
            self.backends[name] = backend
            if name in self.called and getattr(module, "SYNCHRONISES", False):
                self.synchronising.append(name)
            setattr(self, name, getattr(module, name))
            return
        why = f": {'; '.join(told)}" if told else ""
        raise ValueError(f"op {name!r} has no backend {backends[0]!r} here{why}")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"no op {name!r}; known: {', '.join(NAMES)}")
