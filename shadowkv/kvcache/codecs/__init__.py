"""Codecs: formats of stored rows and latents, one file per family. ``register`` makes a codec available to policies.

A policy names row codecs on its axes ``keys`` (which are then coded after RoPE) and ``values``, and latent codecs on
``keys``.
"""

from __future__ import annotations

import re

from shadowkv.kvcache.codecs.fp8 import Fp8Rows
from shadowkv.kvcache.codecs.latents import DenseLatents, Int4Latents, Int8Latents
from shadowkv.kvcache.codecs.lloyd import LLOYD_ROWS
from shadowkv.kvcache.codecs.rotated import ROTATED_ROWS
from shadowkv.kvcache.plugins import checked_name
from shadowkv.ops.codec import FIRST_OUTSIDE_ID, CodecId, LatentCodec, RowCodec

ROW_CODECS: dict[str, RowCodec] = {}
LATENT_CODECS: dict[str, LatentCodec] = {}

NAMES_OF_PARTS: dict[str, set[str]] = {"keys": {"dense"}, "values": {"dense", "rotated"}}
"""Names on the axes that belong to parts and not to codecs."""


def register(codec: RowCodec | LatentCodec) -> None:
    """Registers a codec under its name on its axes. Registering it again changes nothing.

    Raises:
        ValueError: another codec has the same name or id, a part has the same name on one of the axes, the text of a
            policy cannot contain the name, or a codec from outside the package has an id below ``FIRST_OUTSIDE_ID``.
    """
    checked_name(codec.name)
    if codec.id < FIRST_OUTSIDE_ID and type(codec).__module__.partition(".")[0] != "shadowkv":
        reason = f"ids below {FIRST_OUTSIDE_ID} are for shadowkv's own codecs, which kernels know; use another"
        raise ValueError(f"codec {codec.name!r} has id {codec.id}: {reason}")
    known: list[RowCodec | LatentCodec] = [*ROW_CODECS.values(), *LATENT_CODECS.values()]
    for other in known:
        if (type(codec), codec.name, codec.id) == (type(other), other.name, other.id):
            return
        if codec.name == other.name or codec.id == other.id:
            raise ValueError(f"codec {codec.name!r} ({codec.id}) is taken by {other.name!r} ({other.id})")
    for axis in codec.axes if isinstance(codec, RowCodec) else ("keys",):
        if codec.name in NAMES_OF_PARTS[axis]:
            raise ValueError(f"codec {codec.name!r} has the name of a part: {axis}={codec.name!r}")
    if isinstance(codec, RowCodec):
        ROW_CODECS[codec.name] = codec
    else:
        LATENT_CODECS[codec.name] = codec


def with_names(reason: str) -> str:
    """Replaces the ids of codecs by their names in a backend's reason, such as ``codec 12 of keys is unknown``."""
    known: list[RowCodec | LatentCodec] = [*ROW_CODECS.values(), *LATENT_CODECS.values()]
    names = {int(CodecId.DENSE): "dense", **{codec.id: codec.name for codec in known}}
    return re.sub(r"(?<=\bcodec )\d+\b", lambda found: names.get(int(found[0]), found[0]), reason)


OURS: list[RowCodec | LatentCodec] = [
    *ROTATED_ROWS.values(), *LLOYD_ROWS.values(), Fp8Rows(), DenseLatents(), Int8Latents(), Int4Latents(),
]  # fmt: skip
for codec in OURS:
    register(codec)
