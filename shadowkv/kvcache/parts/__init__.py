"""The parts of policies, one file each, found by axis and name. ``resolve`` checks a policy, ``build_parts`` makes its
parts.

A new method is a preset with a new part, or with a new format of keys or values (``shadowkv.kvcache.codecs``), or both.
Presets, parts and formats can be registered from outside this package (``plugins.py``; ``shadowkv.baselines`` has
examples). A part sees the keys, values and queries of one layer. A method that needs more cannot be implemented as a
part. For example, InfiniGen computes scores from the input of the previous layer. ``baselines/infinigen.py`` computes
them from the layer's own queries instead.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain
from typing import Any

import torch

from shadowkv.field_types import wrong_types
from shadowkv.kvcache.codecs import LATENT_CODECS, NAMES_OF_PARTS, ROW_CODECS
from shadowkv.kvcache.parts.base import EXCLUDED, IndexPart, KeyPart, Part, PrefillStrategy, StoredPart, ValuePart
from shadowkv.kvcache.plugins import checked_name, has, load_own
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import NARROW, NARROW_BUDGET, NATIVE, PAGE, ROTATED, SKETCH, KVSpec
from shadowkv.ops.registry import Ops
from shadowkv.settings import settings_of, violations

DENSE = "dense"
"""Name of keys or values that are stored exactly, and of prefill that attends to everything."""
OURS = {
    "index": {
        "none": "index_plain:AttendAll",
        "native": "index_native:NativeIndex",
        "chunk-mean": "index_chunks:ChunkMean",
        "chunk-mean-fp8": "index_chunks:ChunkMeanFP8",
        "sketch": "index_sketch:Sketch",
        "sketch-1bit": "index_sketch:SignSketch",
        "exact": "index_plain:Exact",
    },
    "prefill": {DENSE: "prefill:DensePrefill", "sparse": "prefill:SparsePrefill"},
}
"""Modules and classes of this package's indexes and prefill strategies, by name."""
PLACES = ("device", "host")
STORED: dict[str, type[Any]] = {"keys": KeyPart, "index": IndexPart, "values": ValuePart}
KINDS: dict[str, type[Any]] = {**STORED, "prefill": PrefillStrategy}
"""Base class of the parts on each axis."""

REGISTERED: dict[str, dict[str, type[Part]]] = {axis: {} for axis in KINDS}
"""Parts from outside the package, by axis and name."""

AXES: dict[str, Collection[str]] = {
    "keys": ChainMap[str, Any](REGISTERED["keys"], ROW_CODECS, LATENT_CODECS, {DENSE: None}),
    "index": ChainMap[str, Any](REGISTERED["index"], OURS["index"]),
    "values": ChainMap[str, Any](REGISTERED["values"], {ROTATED: None}, ROW_CODECS, {DENSE: None}),
    "place": PLACES,
    "prefill": ChainMap[str, Any](REGISTERED["prefill"], OURS["prefill"]),
}
"""The names that each of these fields of a KVSpec accepts. Codecs and parts that are registered later appear too.
``prefill`` can also be None."""


def register(axis: str, name: str, part: type[Part]) -> None:
    """Registers a part from outside the package on an axis: ``keys``, ``index``, ``values`` or ``prefill``.
    Registering it again changes nothing.

    Raises:
        ValueError: the axis does not exist, the axis already has the name, or the name has characters that are not
            allowed.
        TypeError: ``part`` is no subclass of the axis's base class.
    """
    if axis not in KINDS:
        raise ValueError(f"there is no axis {axis!r} of parts: {', '.join(KINDS)}")
    if not (isinstance(part, type) and issubclass(part, KINDS[axis])):
        raise TypeError(f"{axis}={name!r} must be a subclass of {KINDS[axis].__name__}, not {part!r}")
    if REGISTERED[axis].get(name) is part:
        return
    if checked_name(name) in AXES[axis]:
        raise ValueError(f"{axis}={name!r} is taken: the names are {', '.join(AXES[axis])}")
    REGISTERED[axis][name] = part
    if axis in NAMES_OF_PARTS:
        NAMES_OF_PARTS[axis].add(name)


def is_known(axis: str, name: str) -> bool:
    """Whether a field of a KVSpec accepts a name. Loads plugins for a name that is unknown without them."""
    return name in PLACES if axis == "place" else has(AXES[axis], name)


@dataclass(frozen=True)
class Parts:
    """The parts of a policy that store bytes: keys, index and values. The layout implements the place."""

    keys: KeyPart
    index: IndexPart
    values: ValuePart

    @property
    def ops(self) -> frozenset[str]:
        """Names of the ops that the parts call."""
        return frozenset(op for part in self for op in part.ops)

    @property
    def observing(self) -> bool:
        """Whether a part learns from a prompt's last queries."""
        return any(part.observes for part in self)

    def captures_observe(self, ops: Ops) -> bool:
        """Whether a CUDA graph can capture what parts learn from a prompt's last queries, with an engine's ops."""
        return all(part.captures_observe(ops) for part in self if part.observes)

    @property
    def diagnostics(self) -> tuple[str, ...]:
        """Names of the diagnostics that the parts report."""
        return tuple(name for part in self for name in part.diagnostics)

    def __iter__(self) -> Iterator[StoredPart]:
        return iter((self.keys, self.index, self.values))


def build_parts(spec: KVSpec, shape: ModelShape, dtype: torch.dtype) -> Parts:
    """Makes the parts of the resolved policy ``spec``, for ``shape`` and the cache's ``dtype``.

    Raises ValueError if two of their arrays have the same name.
    """
    parts = Parts(*(_part(axis, getattr(spec, axis))(spec, shape, dtype) for axis in STORED))
    for kind, fields in (
        ("pages", [EXCLUDED, *(field.name for part in parts for field in part.page_fields())]),
        ("states", [field.name for part in parts for field in part.state_fields()]),
    ):
        twice = sorted({name for name in fields if fields.count(name) > 1})
        if twice:
            names = ", ".join(f"{axis}={getattr(spec, axis)!r}" for axis in STORED)
            raise ValueError(f"arrays of {kind} have the same name, {', '.join(twice)}: parts {names}")
    return parts


def resolve(spec: KVSpec, shape: ModelShape) -> KVSpec:
    """Resolves a policy for models of ``shape``: gives every setting of its parts a value. Raises ValueError with all
    reasons why the policy cannot be used."""
    narrow = shape.kv_dim < NARROW
    if spec.values == ROTATED:
        spec = replace(spec, values="rotated-4bit" if shape.head_dim % 64 or narrow else "rotated-3bit")
    if spec.index == SKETCH and shape.indexed:
        spec = spec.changed(index=NATIVE)
    if spec.has_index and not spec.native and spec.budget is None and spec.min_budget is None:
        # Wide keys get a value, too: a rank has fewer heads than the model and resolves the policy again.
        least = NARROW_BUDGET if narrow and spec.finds_tokens and spec.selects else spec.default_budget[1]
        spec = replace(spec, min_budget=least)
    unknown = [axis for axis in AXES if (name := getattr(spec, axis)) is not None and not is_known(axis, name)]
    reasons = [f"{axis}={getattr(spec, axis)!r} is not one of {', '.join(AXES[axis])}" for axis in unknown]
    parts = _parts(spec)
    if not unknown:
        reasons += _foreign(spec, parts)
    wrong = [reason for part in parts for reason in _wrong(part.settings_of(spec))]
    if not wrong:
        spec = _with_all(spec, parts, shape)
        wrong = [reason for part in parts for reason in part.unsupported(spec, shape)]
    reasons += wrong
    reasons += spec.contradictions(shape)
    if not reasons:
        reasons = _unsupported_by_indexers(spec, shape)
    if reasons:
        raise ValueError("this KV policy cannot be used:\n" + "\n".join(f"  - {reason}" for reason in reasons))
    return replace(spec, index="none") if spec.native else spec  # layers with an indexer get ``native`` from the layout


def _unsupported_by_indexers(spec: KVSpec, shape: ModelShape) -> list[str]:
    """Reasons why layers with an indexer cannot have the keys and values of ``spec``."""
    reasons = []
    for indexer in dict.fromkeys(kind.indexer for kind in shape.kinds if kind.indexer is not None):
        native = spec.of_indexer(indexer)
        reasons += [reason for part in _parts(native) for reason in part.unsupported(native, shape)]
        if indexer.budget < native.local + PAGE:
            reasons.append(
                f"local={native.local} tokens and a page of {PAGE} are more than the {indexer.budget} that a query "
                f"attends to in layers with an indexer: use at most {indexer.budget - PAGE}"
            )
    return reasons


def _parts(spec: KVSpec) -> list[type[Part]]:
    """Returns the parts of ``spec``, without unknown ones. If its prefill is None, they include every strategy for
    which ``spec`` has settings, because an engine may choose that strategy."""
    named = [(axis, getattr(spec, axis)) for axis in KINDS if getattr(spec, axis) is not None]
    parts = [_part(axis, name) for axis, name in named if is_known(axis, name)]
    if spec.prefill is None:
        declaring = (declared(spec, name) for name in dict(spec.settings))
        parts += dict.fromkeys(part for part in declaring if part is not None and part.axis == "prefill")
    return parts


def _wrong(settings: Any) -> list[str]:
    return wrong_types(settings) or violations(settings)


def _foreign(spec: KVSpec, parts: Sequence[type[Part]]) -> list[str]:
    """Returns a reason for each setting of ``spec`` that belongs to none of its parts, or to several."""
    reasons = []
    for name, value in dict(spec.settings).items():
        axis, _, own = name.rpartition(".")
        having = [part.axis for part in parts if own in settings_of(part.Settings) and axis in ("", part.axis)]
        if not having and value is not None:
            known = declared(spec, name)
            axes = STORED if known is None else [known.axis]
            reason = f"{own}={value!r} has no meaning with {', '.join(f'{one}={getattr(spec, one)!r}' for one in axes)}"
            if known is not None:
                load_own()
                others = (other for other in AXES[known.axis] if own in settings_of(_part(known.axis, other).Settings))
                reason += f"; {known.axis} that have it: {', '.join(others)}"
            reasons.append(reason)
        elif len(having) > 1:
            several = " or ".join(f"{axis}.{own}" for axis in having)
            reasons.append(f"{name}={value!r} is ambiguous: use {several}")
    return reasons


def _with_all(spec: KVSpec, parts: Sequence[type[Part]], shape: ModelShape) -> KVSpec:
    """Returns ``spec`` with a value for every setting of its parts."""
    values = dict[str, Any]()
    for part in parts:
        own = part.with_defaults(spec, shape)
        values |= {f"{part.axis}.{name}": getattr(own, name) for name in settings_of(part.Settings)}
    return replace(spec, settings=values)


def parts_by_setting() -> dict[tuple[str, str, type[Any]], list[str]]:
    """Returns, for each setting, the names of the parts that have it. Keys are the setting's axis, its name and the
    dataclass that declares it. Loads the package's own plugin."""
    load_own()
    found = dict[tuple[str, str, type[Any]], list[str]]()
    for axis in KINDS:
        for name in AXES[axis]:
            owner = _part(axis, name).Settings
            for one in settings_of(owner):
                found.setdefault((axis, one, owner), []).append(name)
    return found


def declared(spec: KVSpec, name: str) -> type[Part] | None:
    """The part that declares the setting ``name``, which can begin with an axis (``keys.rank``). Parts of ``spec`` come
    first, then all other parts; None if no part declares it."""
    axis, _, own = name.rpartition(".")
    axes = [one for one in KINDS if axis in ("", one)]
    named = [(one, getattr(spec, one)) for one in axes if getattr(spec, one) is not None]
    of_spec = [_part(one, part) for one, part in named if is_known(one, part)]
    others = (_part(one, other) for one in axes for other in AXES[one])
    return next((part for part in chain(of_spec, others) if own in settings_of(part.Settings)), None)


def key_part(spec: KVSpec) -> type[KeyPart]:
    """The class of the key part of ``spec``."""
    part: type[KeyPart] = _part("keys", spec.keys)
    return part


def prefill_strategy(spec: KVSpec) -> type[PrefillStrategy]:
    """The class of the prefill strategy of ``spec``; dense if its prefill is None."""
    strategy: type[PrefillStrategy] = _part("prefill", spec.prefill or DENSE)
    return strategy


def stored_settings(spec: KVSpec) -> dict[str, Any]:
    """The settings of a resolved policy that change stored bytes."""
    parts = [*(_part(axis, getattr(spec, axis)) for axis in STORED), prefill_strategy(spec)]
    names = {f"{part.axis}.{name}" for part in parts for name in settings_of(part.Settings).keys() - part.unstored}
    return {name: value for name, value in dict(spec.settings).items() if name in names}


def describe(spec: KVSpec, shape: ModelShape) -> str:
    """Describes every part and number of a resolved policy in one line."""
    prefill = list[str]()
    if spec.prefill is not None:
        prefill = [f"{spec.prefill} prefill {prefill_strategy(spec).described(spec, shape)}".rstrip()]
    attended = "every token attended"
    if shape.indexed:
        kinds = dict.fromkeys(str(kind) for kind in shape.kinds if kind.indexer is not None)
        prefill += [f"{' or '.join(kinds)} attended in layers with an indexer"]
    if not spec.compresses:
        return ", ".join(("every key and value exact on the device", attended, *prefill))
    described = {axis: _part(axis, getattr(spec, axis)).described(spec, shape) for axis in STORED}
    keys, index, values = (
        f"{getattr(spec, axis)} {axis}{f' ({words})' if words else ''}" for axis, words in described.items()
    )
    words = [keys, index, f"{values} on the {spec.place}", f"chunks of {spec.chunk} tokens"]
    if spec.selects:
        words += [spec.describe_budget(), f"{spec.outliers} outlier chunks per kv head"]
    elif spec.drafts:
        words.append(f"draft steps attend to selected tokens ({spec.describe_budget()}), others to every token")
    words.append(f"newest {spec.local} tokens exact, whole sequences up to {spec.dense_limit} tokens exact")
    if spec.skip_layers:
        words.append(f"first and last {spec.skip_layers} layers exact")
    return ", ".join(words + prefill)


def _part(axis: str, name: str) -> Any:  # each axis has its own class
    if name in REGISTERED[axis]:
        return REGISTERED[axis][name]
    if axis in OURS:
        path = OURS[axis][name]
    elif name in LATENT_CODECS:
        path = "keys_low_rank:LowRankKeys"
    else:
        kind = axis.capitalize()
        path = f"rows:Dense{kind}" if name == DENSE else f"rows:Coded{kind}"
    module, name = path.split(":")
    return getattr(import_module(f"shadowkv.kvcache.parts.{module}"), name)
