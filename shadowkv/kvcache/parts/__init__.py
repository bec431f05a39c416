"""The parts a policy is put together from, one file each, found by name on their axis.

A new method is one part file, one line here and one line in ``presets.py``. What a part sees are a layer's keys,
values and queries; what needs more does not fit here, as InfiniGen's scores from the input of the layer before
(arXiv:2406.19707; ``index_skewed.py`` has the rest of it).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from shadowkv.kvcache.parts.base import IndexPart, KeyPart, ValuePart
from shadowkv.kvcache.shape import ModelShape
from shadowkv.kvcache.spec import ROTATED, KVSpec

KEY_PARTS = {
    "dense": "keys_dense:DenseKeys",
    "low-rank": "keys_low_rank:LowRankKeys",
    "low-rank-int8": "keys_low_rank:LowRankInt8Keys",
    "low-rank-int4": "keys_low_rank:LowRankInt4Keys",
}
INDEX_PARTS = {
    "none": "index_none:AttendAll",
    "chunk-mean": "index_chunk_mean:ChunkMean",
    "chunk-mean-fp8": "index_chunk_mean:ChunkMeanFP8",
    "min-max": "index_min_max:MinMax",
    "sketch": "index_sketch:Sketch",
    "sketch-1bit": "index_sketch:SignSketch",
    "exact": "index_exact:Exact",
    "recent": "index_recent:Recent",
    "pca": "index_pca:PCA",
    "votes": "index_votes:Votes",
    "skewed": "index_skewed:Skewed",
}
VALUE_PARTS = {
    "dense": "values_dense:DenseValues",
    "rotated-4bit": "values_rotated:RotatedValues4Bit",
    "rotated-3bit": "values_rotated:RotatedValues3Bit",
    "rotated-2bit": "values_rotated:RotatedValues2Bit",
}
PLACES = ("device", "host")
AXES = {"keys": KEY_PARTS, "index": INDEX_PARTS, "values": (*VALUE_PARTS, ROTATED), "place": PLACES}
"""The names that each of these fields of a KVSpec can have."""


@dataclass(frozen=True)
class Parts:
    """The three parts of a policy; the place is a matter of the layout."""

    keys: KeyPart
    index: IndexPart
    values: ValuePart


def build_parts(spec: KVSpec, shape: ModelShape, dtype: torch.dtype) -> Parts:
    """The parts that the resolved ``spec`` names, for ``shape`` and the cache's ``dtype``."""

    return Parts(*(part(spec, shape, dtype) for part in _classes(spec)))


def unsupported(spec: KVSpec, shape: ModelShape) -> list[str]:
    """Why the parts that ``spec`` names cannot serve ``shape``; empty where they can."""
    return [reason for part in _classes(spec) for reason in part.unsupported(spec, shape)]


def _classes(spec: KVSpec) -> list[Any]:  # each axis has its own class
    names = KEY_PARTS[spec.keys], INDEX_PARTS[spec.index], VALUE_PARTS[spec.values]
    modules = [entry.split(":") for entry in names]
    return [getattr(import_module(f"shadowkv.kvcache.parts.{module}"), name) for module, name in modules]
