"""What two caches must have in common for one to take over what the other has stored."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from hashlib import sha256

from shadowkv.kvcache.policy.spec import FORMER_NAMES, PREFILLS
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.ops.apply_rope.tables import RopeConfig

FORMAT = 1
"""Version of snapshots and of all codecs' bytes: to be incremented when either changes and no shape or dtype of a field
shows it already, as files outlive the program."""

LATER: dict[str, object] = {"skip_layers": 0, "key_groups": 1, "prefill_error": None}
"""Fields added since the oldest readable files, with the values that those files imply."""


def form_of(layout: Layout, rope: RopeConfig) -> str:
    """A digest, in 64 hexadecimal digits, of format, sizes, RoPE, fields and policy, except for how much is
    selected, how much stays exact after what is sealed, and where it is stored. Comparing weights is left to others."""
    spec = replace(layout.spec, budget=None, mass=None, sampled=0.0, local=1, place="device")
    spec = replace(spec, prefill=spec.prefill or PREFILLS[0])
    error = None if spec.prefill == "dense" else float(spec.prefill_error)  # what a dense one has is of no account
    fields = (*layout.sealed_fields, *layout.host_fields, *layout.state_fields)
    form = {
        "format": FORMAT,
        "spec": {
            FORMER_NAMES.get(name, name): value
            for name, value in {**asdict(spec), "prefill_error": error}.items()
            if LATER.get(name) != value
        },
        "shape": asdict(layout.shape),
        "rope": asdict(rope),
        "dtype": str(layout.dtype),
        "fields": sorted((field.name, field.shape, str(field.dtype)) for field in fields),
    }
    return sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()
