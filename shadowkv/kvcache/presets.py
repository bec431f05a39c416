"""Presets: the named cache policies, one line each. A method is a combination of parts.

The function ``preset`` parses the value of ``--kv``. Presets of baselines are in ``shadowkv.baselines``. They are
loaded when a name is needed that this module does not know (``plugins.py``).
"""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

from shadowkv.kvcache.plugins import checked_name, has
from shadowkv.kvcache.policy.spec import NAMES, KVSpec
from shadowkv.settings import violation

PRESETS: dict[str, KVSpec] = {
    # Every key and value exact on the device: the baseline.
    "full": KVSpec(),
    # This preset gives the same answers as ``full``. Draft steps attend to what a sketch of every key selects, and a
    # step that attends to all tokens verifies the drafts: sparse self-speculation (MagicDec, arXiv:2408.11049).
    "full-speculative": KVSpec(index="sketch", chunk=1, drafts=True, settings={"index.sampled": 0.5}),
    # The paper: arXiv:2410.21465, section 5.1.
    "shadowkv": KVSpec(keys="low-rank", index="chunk-mean", place="host", chunk=8, outliers=48),
    # This project's own policies: a sketch of every key is searched, and values have 3 or 4 bits (``ROTATED``). If
    # values are on the device, single tokens can be selected, and half of the budget is sampled.
    "turbo": KVSpec(keys="low-rank-int4", index="sketch", values="rotated", chunk=1, settings={"index.sampled": 0.5}),
    "turbo-host": KVSpec(keys="low-rank-int4", index="sketch", values="rotated", place="host", chunk=8),
    # The oracle: its index computes exact scores, which every other index approximates, and selects the tokens with the
    # largest ones.
    "exact-top-k": KVSpec(index="exact", chunk=1),
    # The following presets store keys and values in few bits and attend to all tokens.
    # TurboQuant: arXiv:2504.19874; with this project's scales (``codecs/lloyd.py``), and with the mean subtracted from
    # keys.
    "turboquant-4": KVSpec(keys="lloyd-4bit", values="lloyd-4bit", settings={"centred": True}),
    "turboquant-3": KVSpec(keys="lloyd-3bit", values="lloyd-3bit", settings={"centred": True}),
    # 8-bit floats: the baseline for TurboQuant's formats.
    "fp8": KVSpec(keys="fp8", values="fp8"),
}


CACHE_DTYPES = {
    "bfloat16": "full",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "turboquant_4bit": "turboquant-4",
    "turboquant_4bit_nc": "turboquant-4",
    "turboquant_3bit": "turboquant-3",
    "turboquant_3bit_nc": "turboquant-3",
    "turboquant_k8v4": "full:keys=fp8,values=lloyd-4bit",
    "turboquant_k3v4_nc": "full:keys=lloyd-3bit,values=lloyd-4bit,centred=true",
}
"""The policy for each value of vLLM's ``--kv-cache-dtype``."""

POLICY_HELP = (
    f"{', '.join(PRESETS)}, a baseline (quest, snapkv, ...), or one of them with fields or settings of parts changed: "
    "turbo:chunk=8,values=dense,rank=160; 'help' lists them all"
)
"""The syntax of ``preset``, for the help of command lines."""


OURS = frozenset(PRESETS)
"""Names of the presets of this package. All others are registered from outside it."""


def register(name: str, spec: KVSpec) -> None:
    """Registers a policy from outside this package as a preset. Registering an equal policy under the same name again
    changes nothing.

    Raises:
        ValueError: the name is taken or has characters that are not allowed.
        TypeError: ``spec`` is no KVSpec.
    """
    if PRESETS.get(name) == spec:
        return
    if checked_name(name) in PRESETS:
        raise ValueError(f"the preset {name!r} is taken: the names are {', '.join(PRESETS)}")
    if not isinstance(spec, KVSpec):
        raise TypeError(f"the preset {name!r} must be a KVSpec, not {spec!r}")
    PRESETS[name] = spec


def with_drafts(spec: KVSpec) -> KVSpec:
    """Returns ``spec``, a policy that attends to every token, with the index of ``full-speculative`` added. This index
    selects in draft steps only."""
    if spec.drafts:
        return spec
    own = PRESETS["full-speculative"]
    return spec.changed(index=own.index, chunk=own.chunk, drafts=True, **dict(own.settings))


def preset(kv: str | KVSpec, **overrides: Any) -> KVSpec:
    """Reads a policy.

    Args:
        kv: a policy, or a preset's name with changed fields: ``turbo:chunk=8,values=dense,budget=0.03``.
        overrides: fields to change. A field whose value here is None is not changed.

    Raises ValueError for an unknown preset, and for unknown fields and invalid values; the message lists all of these.
    Raises PluginError if a name is unknown and a plugin that may register it cannot be loaded.
    """
    if isinstance(kv, str):
        kv = _parse(kv)
    return kv.changed(**{key: value for key, value in overrides.items() if value is not None})


def _parse(text: str) -> KVSpec:
    name, colon, changes = text.partition(":")
    if not has(PRESETS, name):
        raise ValueError(f"unknown KV preset {name!r}; known: {', '.join(PRESETS)}")
    bad, spec = list[str](), PRESETS[name]
    for change in changes.split(",") if colon else ():
        field, _, value = change.partition("=")
        try:
            spec = spec.changed(**{field: _value(spec, field, value)})
        except ValueError as error:
            bad.append(str(error))
    if bad:
        raise ValueError(f"KV policy {text!r} cannot be read: {'; '.join(bad)}")
    return spec


def _value(spec: KVSpec, field: str, text: str) -> Any:
    """Parses and checks the value of a field of ``spec`` or of a part's setting. Raises ValueError."""
    from shadowkv.kvcache.parts import AXES, declared, is_known, parts_by_setting

    if field in AXES:
        if not is_known(field, text):
            raise ValueError(f"{field}={text!r} is not one of {', '.join(AXES[field])}")
        return text
    part = None if field in NAMES or field.startswith(".") else declared(spec, field)
    if field not in NAMES and part is None:
        settings = ", ".join(dict.fromkeys(f"{axis}.{name}" for axis, name, _ in parts_by_setting()))
        raise ValueError(f"{field!r} is not a field; known: {', '.join(NAMES)}, and settings of parts: {settings}")
    owner, name = (KVSpec, field) if part is None else (part.Settings, field.rpartition(".")[2])
    value = _converted(get_type_hints(owner)[name], field, text)
    if (wrong := violation(owner, name, value)) is not None:
        raise ValueError(wrong)
    return value


def _converted(kind: Any, field: str, text: str) -> Any:
    """Converts the text of a field to its type. A number with a decimal point is a fraction, a number without one is a
    count. Raises ValueError."""
    allowed = get_args(kind) or (kind,)
    if bool in allowed:
        if text not in ("true", "false"):
            raise ValueError(f"{field}={text!r} is neither true nor false")
        return text == "true"
    for number in (int, float):
        if number in allowed:
            try:
                return number(text)
            except ValueError:
                pass
    if str in allowed:
        return text
    raise ValueError(f"{field}={text!r} is not {'a number' if float in allowed else 'an integer'}")
