"""Tensors of runs of layers, indexed by layers of the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class ByLayer:
    """Acts as a tensor [num_layers, ...] in which some layers may be missing, or stored elsewhere than others.

    Args:
        runs: for each run of layers that are alike, those layers and their tensor [layers, ...].
    """

    def __init__(self, runs: Iterable[tuple[range, Tensor]]) -> None:
        self._runs = list(runs)

    @property
    def dtype(self) -> torch.dtype:
        return self._runs[0][1].dtype

    @property
    def shape(self) -> torch.Size:
        """Shape of the first run's tensor."""
        return self._runs[0][1].shape

    def __getitem__(self, index: Any) -> Tensor:
        """What a tensor gives for a layer, for a slice of layers of one run, or for either with further indices; ``:``
        requires a single run and stands for its layers."""
        layers, *more = index if isinstance(index, tuple) else (index,)
        if not isinstance(layers, slice):
            first, tensor = self._run_of(int(layers))
            where = int(layers) - first, *more
        elif layers == slice(None):
            ((_, tensor),) = self._runs
            where = layers, *more
        else:
            first, tensor = self._run_of(layers.start)
            assert layers.stop - first <= len(tensor), "layers of several runs"
            where = slice(layers.start - first, layers.stop - first), *more
        return tensor[where]

    def _run_of(self, layer: int) -> tuple[int, Tensor]:
        for run, tensor in self._runs:
            if layer in run:
                return run.start, tensor
        raise IndexError(f"layer {layer} is none of {[run for run, _ in self._runs]}")
