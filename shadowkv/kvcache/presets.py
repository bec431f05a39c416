"""The named cache policies, one line each; a method is a combination of parts.

Where a baseline's paper has another budget, the preset has the default one, so that methods compare at equal budgets.
"""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

from shadowkv.kvcache.plugins import checked_name, load_plugins
from shadowkv.kvcache.policy.spec import NAMES, PREFILLS, KVSpec

PRESETS: dict[str, KVSpec] = {
    # Every key and value exact on the device: the baseline.
    "full": KVSpec(),
    # The paper: arXiv:2410.21465, section 5.1.
    "shadowkv": KVSpec(keys="low-rank", index="chunk-mean", place="host", chunk=8, outliers=48),
    # Ours: every key found by its own sketch, values in 3 bits; where no bus is crossed single tokens are selected, and
    # half of the budget is sampled.
    "turbo": KVSpec(keys="low-rank-int4", index="sketch", values="rotated", chunk=1, sampled=0.5),
    "turbo-host": KVSpec(keys="low-rank-int4", index="sketch", values="rotated", place="host", chunk=8),
    # Quest: arXiv:2406.10774; its pages of 16 tokens are our chunks.
    "quest": KVSpec(index="min-max", chunk=16),
    # StreamingLLM: arXiv:2309.17453; sink and newest tokens. The paper's cache: budget=1020.
    "streaming-llm": KVSpec(index="recent"),
    # Loki: arXiv:2406.02542; a quarter of the principal components finds tokens. The paper's k_f: budget=0.25.
    "loki": KVSpec(index="pca", chunk=1),
    # SnapKV: arXiv:2404.14469; what the prompt's last 64 queries attend to. The paper's caches: budget=1024 to 4096.
    "snapkv": KVSpec(index="votes", chunk=1),
    # InfiniGen: arXiv:2406.19707; 0.3 of the skewed columns finds tokens. The paper: at most budget=0.2.
    "infinigen": KVSpec(index="skewed", chunk=1),
    # TriAttention: arXiv:2604.04921; what the prompt's mean query would look for.
    "triattention": KVSpec(index="trig", chunk=1),
    # The oracle: the tokens with the largest exact scores, what every index above tries to find.
    "exact-top-k": KVSpec(index="exact", chunk=1),
    # Every key and value in a few bits, and all of them attended: TurboQuant, arXiv:2504.19874, with scales of its own
    # and keys without their mean;
    "turboquant-4": KVSpec(keys="lloyd-4bit", values="lloyd-4bit", settings={"centred": True}),
    "turboquant-3": KVSpec(keys="lloyd-3bit", values="lloyd-3bit", settings={"centred": True}),
    # its block format of llama.cpp; levels in 4 bits whose rows keep their norms; and 8-bit floats, their baseline.
    "tq3_0": KVSpec(keys="tq3_0", values="tq3_0"),
    "polar-int4": KVSpec(keys="polar-int4", values="polar-int4"),
    "fp8": KVSpec(keys="fp8", values="fp8"),
    # KVarN: arXiv:2606.03458; 4 bits for keys and 2 for values, of pages whose variances are made alike.
    "kvarn": KVSpec(keys="kvarn-4bit", values="kvarn-2bit"),
    # Shard: principal components of keys in 4 bits on average, values as entries of a codebook.
    "shard": KVSpec(keys="low-rank-mixed", values="vq-4x256", local=64),
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
"""Policies by the values of vLLM's ``--kv-cache-dtype``."""

POLICY_HELP = f"{', '.join(PRESETS)}, or one of them with fields changed: turbo:chunk=8,values=dense,budget=0.03"
"""What ``preset`` takes, for the help of command lines."""


OURS = frozenset(PRESETS)
"""Their names; all others are registered from outside the package."""


def register(name: str, spec: KVSpec) -> None:
    """Makes a policy from outside the package available under a name.

    Raises:
        ValueError: the name is taken, or is none.
        TypeError: ``spec`` is no KVSpec.
    """
    if checked_name(name) in PRESETS:
        raise ValueError(f"the preset {name!r} is taken: the names are {', '.join(PRESETS)}")
    if not isinstance(spec, KVSpec):
        raise TypeError(f"the preset {name!r} is to be a KVSpec, not {spec!r}")
    PRESETS[name] = spec


def preset(kv: str | KVSpec, **overrides: Any) -> KVSpec:
    """The policy of that name, or the given one, with the fields in ``overrides`` that are not None replaced.

    Args:
        kv: a policy, or a preset's name, after which fields may follow: ``turbo:chunk=8,values=dense,budget=0.03``.

    Raises ValueError for a name that neither shadowkv nor a plugin has, and for fields and values that cannot be read,
    all of them at once; PluginError where plugins were to be loaded for a name and one of them cannot be.
    """
    if isinstance(kv, str):
        kv = _parse(kv)
    return kv.changed(**{key: value for key, value in overrides.items() if value is not None})


def _parse(text: str) -> KVSpec:
    name, colon, changes = text.partition(":")
    if name not in PRESETS:
        load_plugins()
    if name not in PRESETS:
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
    """The value of a field of ``spec``, or of a setting of a part, by its type; a number with a decimal point is a
    fraction, one without a count."""
    from shadowkv.kvcache.parts import AXES, declared, is_known

    choices = {**AXES, "prefill": PREFILLS}
    if field in choices:
        if not (is_known(field, text) if field in AXES else text in choices[field]):
            raise ValueError(f"{field}={text!r} is not one of {', '.join(choices[field])}")
        return text
    own = KVSpec if field in NAMES else None if field.startswith(".") else declared(spec, field)
    if own is None:
        raise ValueError(
            f"{field!r} is not a field; known: {', '.join(NAMES)}, and settings of parts (docs/presets.md)"
        )
    kind = get_type_hints(own)[field.rpartition(".")[2]]
    allowed = get_args(kind) or (kind,)
    if bool in allowed:
        if text not in ("true", "false"):
            raise ValueError(f"{field}={text!r} is neither true nor false")
        return text == "true"
    for kind in (int, float):
        if kind in allowed:
            try:
                return kind(text)
            except ValueError:
                pass
    if str in allowed:
        return text
    raise ValueError(f"{field}={text!r} is not {'a number' if float in allowed else 'an integer'}")
