"""Fields of policies and settings of parts: what documents say of them is what they declare."""

from __future__ import annotations

import re
from pathlib import Path

from shadowkv.kvcache import listing
from shadowkv.kvcache.listing import policies_text
from shadowkv.kvcache.parts import AXES
from shadowkv.kvcache.parts.base import Part, ScoredIndex
from shadowkv.kvcache.parts.index_sketch import Sketch
from shadowkv.kvcache.parts.keys_low_rank import LowRankKeys
from shadowkv.kvcache.parts.prefill import SparsePrefill
from shadowkv.kvcache.parts.rows import CodedKeys
from shadowkv.kvcache.plugins import PluginError
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.kvcache.presets import PRESETS
from shadowkv.settings import settings_of

PARTS: list[type[Part]] = [LowRankKeys, CodedKeys, ScoredIndex, Sketch, SparsePrefill]
"""A part for each setting."""

DOCS = Path(__file__).parents[2] / "docs/presets.md"


def test_every_setting_is_in_the_documents_table() -> None:
    rows = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    for owner in (KVSpec, *(part.Settings for part in PARTS)):
        for name, declared in settings_of(owner).items():
            (row,) = (row for row in rows if row.startswith(f"| `{name}` |"))
            default = getattr(owner(), name)
            assert row.endswith(f"| {default} | {declared.help} |"), f"{name}: {default}, {declared.help}"


def test_the_list_of_policies_has_every_preset_field_setting_and_name_of_a_part(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = policies_text()
    assert max(map(len, text.partition("\nfields:")[2].splitlines())) <= 80
    rows = [" ".join(row.split()) for row in re.split(r"\n(?=  \w)", text)]
    presets, fields = ("\n".join(rows).partition("fields:"))[::2]
    for name in PRESETS:
        assert f"\n{name} " in presets, name
    assert "\nturbo keys=low-rank-int4,index=sketch,values=rotated,chunk=1,sampled=0.5\n" in presets
    for owner in (KVSpec, *(part.Settings for part in PARTS)):
        for name, declared in settings_of(owner).items():
            assert any(row.startswith(f"{name}=") and f" {declared.help}" in row for row in rows), name
    for axis, names in AXES.items():
        (row,) = (row for row in rows if row.startswith(f"{axis}=NAME "))
        assert f" names: {', '.join(names)}" in row
    assert "\nbudget=NUMBER what a step selects" in fields
    assert "\ndrafts=true|false " in fields
    assert "not depend on it (default: false)\n" in fields
    assert (
        "\nkey_groups=INTEGER groups of kv heads, each with low-rank keys of its own (default: 1) keys: low-rank, "
        in fields
    )
    assert (
        "\nmass=NUMBER share of the softmax at which a step stops selecting (default: it takes the whole budget) index"
        in fields
    )


def test_the_list_of_policies_names_plugins_that_cannot_be_loaded(monkeypatch) -> None:
    monkeypatch.setattr(listing, "load_installed", lambda: PluginError("plugin 'mine' (x:y) cannot be loaded"))
    assert policies_text().endswith("\nnote: plugin 'mine' (x:y) cannot be loaded")


def test_a_setting_replaces_one_of_the_same_name_and_goes_with_its_part() -> None:
    spec = KVSpec(keys="fp8", settings={"keys.centred": True})
    assert spec.changed(centred=False).settings == (("centred", False),)
    assert spec.changed(centred=False).changed(**{"keys.centred": True}) == spec
    assert spec.changed(keys="dense").settings == ()
    assert spec.changed(index="exact").settings == spec.settings
    assert spec.as_dict()["centred"] is True
