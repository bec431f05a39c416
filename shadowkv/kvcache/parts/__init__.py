"""The parts that a policy is made of, one file each, found by name on their axis.

A new method is one part file, one line here and one line in ``presets.py``; a new format of keys or values is a codec
(``shadowkv.kvcache.codecs``). Packages of one's own ``register`` all three (``plugins.py``). A part sees a layer's
keys, values and queries; what needs more does not fit here, such as InfiniGen's scores from the input of the layer
before (arXiv:2406.19707; ``index_skewed.py`` has the rest of it).
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from shadowkv.kvcache.codecs import LATENT_CODECS, NAMES_OF_PARTS, ROW_CODECS
from shadowkv.kvcache.parts.base import EXCLUDED, IndexPart, KeyPart, Part, ValuePart
from shadowkv.kvcache.plugins import checked_name, load_plugins
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import ROTATED, KVSpec

DENSE = "dense"
"""Keys or values as they are."""
INDEX_PARTS = {
    "none": "index_plain:AttendAll",
    "chunk-mean": "index_chunks:ChunkMean",
    "chunk-mean-fp8": "index_chunks:ChunkMeanFP8",
    "min-max": "index_chunks:MinMax",
    "sketch": "index_sketch:Sketch",
    "sketch-1bit": "index_sketch:SignSketch",
    "exact": "index_plain:Exact",
    "recent": "index_plain:Recent",
    "pca": "index_pca:PCA",
    "votes": "index_votes:Votes",
    "skewed": "index_skewed:Skewed",
    "trig": "index_trig:Trig",
}
PLACES = ("device", "host")
KINDS: dict[str, type[Any]] = {"keys": KeyPart, "index": IndexPart, "values": ValuePart}
"""What parts on each axis are."""

REGISTERED: dict[str, dict[str, type[Part]]] = {axis: {} for axis in KINDS}
"""Parts from outside the package, by axis and name."""

AXES: dict[str, Collection[str]] = {
    "keys": ChainMap[str, Any](REGISTERED["keys"], ROW_CODECS, LATENT_CODECS, {DENSE: None}),
    "index": ChainMap[str, Any](REGISTERED["index"], INDEX_PARTS),
    "values": ChainMap[str, Any](REGISTERED["values"], {ROTATED: None}, ROW_CODECS, {DENSE: None}),
    "place": PLACES,
}
"""The names that each of these fields of a KVSpec can have, those of codecs and parts registered later too."""


def register(axis: str, name: str, part: type[Part]) -> None:
    """Makes a part from outside the package available under a name on an axis: ``keys``, ``index`` or ``values``.

    Raises:
        ValueError: there is no such axis, or the name is taken on it, or is none.
        TypeError: ``part`` is no class of the axis's kind.
    """
    if axis not in KINDS:
        raise ValueError(f"there is no axis {axis!r} of parts: {', '.join(KINDS)}")
    if checked_name(name) in AXES[axis]:
        raise ValueError(f"{axis}={name!r} is taken: the names are {', '.join(AXES[axis])}")
    if not (isinstance(part, type) and issubclass(part, KINDS[axis])):
        raise TypeError(f"{axis}={name!r} is to be a subclass of {KINDS[axis].__name__}, not {part!r}")
    REGISTERED[axis][name] = part
    if axis in NAMES_OF_PARTS:
        NAMES_OF_PARTS[axis].add(name)


def is_known(axis: str, name: str) -> bool:
    """Whether a field of a KVSpec can have that name; plugins are loaded for one that is not there without them."""
    if name not in AXES[axis] and axis in KINDS:
        load_plugins()
    return name in AXES[axis]


@dataclass(frozen=True)
class Parts:
    """The three parts of a policy; the place is up to the layout."""

    keys: KeyPart
    index: IndexPart
    values: ValuePart

    @property
    def ops(self) -> frozenset[str]:
        """Ops that the parts call."""
        return frozenset(op for part in self for op in part.ops)

    @property
    def observing(self) -> bool:
        """Whether one of them learns from a prompt's last queries."""
        return any(type(part).observe is not Part.observe for part in self)

    @property
    def diagnostics(self) -> tuple[str, ...]:
        """Diagnostics that the parts report."""
        return tuple(name for part in self for name in part.diagnostics)

    def __iter__(self) -> Iterator[Part]:
        return iter((self.keys, self.index, self.values))


def build_parts(spec: KVSpec, shape: ModelShape, dtype: torch.dtype) -> Parts:
    """The parts that the resolved ``spec`` names, for ``shape`` and the cache's ``dtype``.

    Raises ValueError where two of their arrays have one name.
    """
    parts = Parts(*(_part(spec, axis)(spec, shape, dtype) for axis in KINDS))
    for kind, fields in (
        ("pages", [EXCLUDED, *(field.name for part in parts for field in part.page_fields())]),
        ("states", [field.name for part in parts for field in part.state_fields()]),
    ):
        twice = sorted({name for name in fields if fields.count(name) > 1})
        if twice:
            names = ", ".join(f"{axis}={getattr(spec, axis)!r}" for axis in KINDS)
            raise ValueError(f"arrays of {kind} have the same name, {', '.join(twice)}: parts {names}")
    return parts


def resolve(spec: KVSpec, shape: ModelShape) -> KVSpec:
    """``spec`` for models of ``shape``, its defaults filled in; raises ValueError with every reason it cannot be
    used."""
    if spec.values == ROTATED:
        spec = replace(spec, values="rotated-4bit" if shape.head_dim % 64 else "rotated-3bit")
    reasons = []
    for axis, known in AXES.items():
        if not is_known(axis, getattr(spec, axis)):
            reasons.append(f"{axis}={getattr(spec, axis)!r} is not one of {', '.join(known)}")
        elif axis != "place":
            part = _part(spec, axis)
            spec = part.with_defaults(spec, shape)
            reasons += part.unsupported(spec, shape)
    reasons += spec.contradictions(shape)
    if reasons:
        raise ValueError("this KV policy cannot be used:\n" + "\n".join(f"  - {reason}" for reason in reasons))
    return spec


def _part(spec: KVSpec, axis: str) -> Any:  # each axis has its own class
    name = getattr(spec, axis)
    if name in REGISTERED[axis]:
        return REGISTERED[axis][name]
    if axis == "index":
        path = INDEX_PARTS[name]
    elif name in LATENT_CODECS:
        path = "keys_low_rank:LowRankKeys" if LATENT_CODECS[name].bits is None else "keys_mixed:MixedLowRankKeys"
    else:
        kind = axis.capitalize()
        path = f"rows:Dense{kind}" if name == DENSE else f"rows:Coded{kind}"
    module, name = path.split(":")
    return getattr(import_module(f"shadowkv.kvcache.parts.{module}"), name)
