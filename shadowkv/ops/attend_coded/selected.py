"""Attention over all tokens by backends of ``attend_selected``, with every chunk selected. On a GPU, these serve
low-rank keys in formats that no other kernel supports."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from shadowkv.ops.attend_selected.sources import CodedRows, DenseRows, KeySource, heads_and_chunk
from shadowkv.ops.case import Case
from shadowkv.ops.page import PAGE
from shadowkv.ops.sequence_rows import SequenceRows

BACKENDS = {
    "cpu": ("cpu", False),
    "cuda_selected_sm90": ("cuda_sm90", False),
    "cuda_selected": ("cuda", True),
    "triton_selected": ("triton", False),
}
"""The backends by name. For each, the backend of ``attend_selected`` that it calls, and whether it serves only latents,
because other kernels read rows faster."""


class EveryChunk(ModuleType):
    """One of ``BACKENDS``, with the functions that the registry reads from a backend's file."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        selected, self._latents_only = BACKENDS[name]
        self._selected = import_module(f"shadowkv.ops.attend_selected.{selected}")

    def __deepcopy__(self, memo: dict[int, object]) -> EveryChunk:
        """Returns itself, as deep copies of functions do. A dry run copies the ops of a model's layers."""
        return self

    def missing(self) -> list[str]:
        """Why this backend cannot run here."""
        reasons: list[str] = getattr(self._selected, "missing", lambda: [])()
        return reasons

    def supports(self, case: Case) -> list[str]:
        """Why this backend cannot serve ``case``."""
        if self._latents_only and not case.rank:
            return [f"codec {case.key_codec} of keys is not for latents"]
        reasons: list[str] = self._selected.supports(case)
        return reasons

    def attend_coded(
        self,
        q: Tensor,
        keys: KeySource,
        values: DenseRows | CodedRows,
        begin: Tensor,
        end: Tensor,
        sequences: SequenceRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Same as the reference, for arguments that the backend of ``attend_selected`` supports. On a GPU, it can be
        captured in a CUDA graph after a first call. Rows begin and end at chunk boundaries. Each row reads its pages,
        also if ``sequences`` has several.

        Raises:
            ValueError: on a CPU, a row begins or ends within a chunk. On a GPU, this is not checked, because the host
                would have to wait.
        """
        out, lse = self._selected.attend_selected(q, keys, values, every_chunk(keys, begin, end))
        return out, lse


def every_chunk(keys: KeySource, begin: Tensor, end: Tensor) -> Tensor:
    """Returns the numbers of the chunks from ``begin`` up to ``end``, followed by -1s: int64 [B, H, k]. Raises
    ValueError as ``EveryChunk.attend_coded`` does."""
    heads, chunk = heads_and_chunk(keys)
    for name, place in (("begin", begin), ("end", end)):
        if place.device.type == "cpu" and (place % chunk).any():
            raise ValueError(f"{name} {place.tolist()} are not multiples of the chunk size {chunk}")
    count = keys.pages.shape[1] * PAGE // chunk
    chunks = torch.arange(count, device=begin.device).expand(len(begin), -1) + (begin // chunk)[:, None]
    chunks = chunks.masked_fill(chunks >= (end // chunk)[:, None], -1)
    return chunks.unsqueeze(1).expand(-1, heads, -1).contiguous()
