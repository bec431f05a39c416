"""Settings of parts: what documents say of them is what they declare."""

from __future__ import annotations

from pathlib import Path

from shadowkv.kvcache.parts.base import Part, ScoredIndex
from shadowkv.kvcache.parts.index_sketch import Sketch
from shadowkv.kvcache.parts.keys_low_rank import LowRankKeys
from shadowkv.kvcache.parts.prefill import SparsePrefill
from shadowkv.kvcache.parts.rows import CodedKeys
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.settings import settings_of

DOCS = Path(__file__).parents[2] / "docs/presets.md"


def test_every_setting_is_in_the_documents_table() -> None:
    rows = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    parts: list[type[Part]] = [LowRankKeys, CodedKeys, ScoredIndex, Sketch, SparsePrefill]
    for part in parts:
        for name, declared in settings_of(part.Settings).items():
            (row,) = (row for row in rows if row.startswith(f"| `{name}` |"))
            default = getattr(part.Settings(), name)
            assert row.endswith(f"| {default} | {declared.help} |"), f"{name}: {default}, {declared.help}"


def test_a_setting_replaces_one_of_the_same_name_and_goes_with_its_part() -> None:
    spec = KVSpec(keys="fp8", settings={"keys.centred": True})
    assert spec.changed(centred=False).settings == (("centred", False),)
    assert spec.changed(centred=False).changed(**{"keys.centred": True}) == spec
    assert spec.changed(keys="dense").settings == ()
    assert spec.changed(index="exact").settings == spec.settings
    assert spec.as_dict()["centred"] is True
