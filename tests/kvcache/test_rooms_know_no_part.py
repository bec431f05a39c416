"""What works with any policy asks its parts: it names none of their fields, and imports neither them nor their ops."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shadowkv.kvcache.codecs import LATENT_CODECS, ROW_CODECS
from shadowkv.kvcache.parts import AXES, REGISTERED, build_parts
from shadowkv.kvcache.parts.base import EXCLUDED, StoredPart
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import KVSpec

ROOT = Path(__file__).resolve().parents[2] / "shadowkv"
SHAPE = ModelShape(num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=128)
EXCEPT = {
    "presets.py": "says what policies are: keys and values are fields there, too",
}


def every_part() -> Iterator[StoredPart]:
    """The parts of every name on every axis."""
    for name in AXES["index"]:
        yield build_parts(KVSpec(index=name), SHAPE, torch.float32).index
    for name in (*LATENT_CODECS, *REGISTERED["keys"]):
        yield build_parts(KVSpec(keys=name, settings={"rank": 32}), SHAPE, torch.float32).keys
    for name, codec in ROW_CODECS.items():
        parts = build_parts(KVSpec(**dict.fromkeys(codec.axes, name), settings={"centred": True}), SHAPE, torch.float32)
        yield from (getattr(parts, axis) for axis in codec.axes)


FIELDS = {field.name for part in every_part() for field in (*part.page_fields(), *part.state_fields())} | {EXCLUDED}
OPS = {op for part in every_part() for op in part.ops}


def known(source: str) -> Iterator[str]:
    """What code knows of parts."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value in FIELDS:
            yield f"{node.lineno}: the field {node.value!r}"
        if isinstance(node, ast.ImportFrom):
            folder, *rest = (node.module or "").removeprefix("shadowkv.").split(".")
            of_a_part = (folder, *rest[:1]) == ("kvcache", "parts") and len(rest) > 1 and rest[1] != "base"
            if of_a_part or (folder == "ops" and OPS & set(rest)):
                yield f"{node.lineno}: {node.module}"


def test_generic_rooms_know_no_part() -> None:
    rooms = [path for room in ("engine", "plan") for path in sorted((ROOT / room).glob("*.py"))]
    rooms += [path for path in sorted((ROOT / "kvcache").rglob("*.py")) if path.parent.name not in ("parts", "codecs")]
    found = [f"{path}:{one}" for path in rooms if path.name not in EXCEPT for one in known(path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('store.page["latents"][0]', 1),
        ('"kept_energy" in state, "excluded"', 2),
        ("from shadowkv.ops.low_rank_basis.cuda import ROWS_AT_ONCE", 1),
        ("from shadowkv.kvcache.parts.keys_low_rank import LowRankKeys", 1),
        ("from shadowkv.kvcache.parts.base import EXCLUDED\nfrom shadowkv.ops.apply_rope.tables import RopeConfig", 0),
        ('"""The latents."""\nstore.page[field.name]', 0),
    ],
)
def test_the_search_finds_them(source: str, count: int) -> None:
    assert len(list(known(source))) == count
