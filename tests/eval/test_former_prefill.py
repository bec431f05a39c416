"""Folders with answers behind the former sparse prefill, whose policies have no ``prefill_error``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shadowkv.eval.provenance import write_config
from shadowkv.eval.records.policies import local_policies
from shadowkv.models.loader import LoadedModel


@pytest.mark.parametrize(("policy", "goes_on"), [("full:prefill=sparse", False), ("full:prefill=dense", True)])
def test_only_dense_ones_go_on(loaded: LoadedModel, tmp_path: Path, policy: str, goes_on: bool) -> None:
    policies = local_policies([policy], [], loaded.config.shape)
    write_config(tmp_path, {}, policies, [])
    config = json.loads((tmp_path / "config.json").read_text())
    del config["policies"][policy]["prefill_error"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    if goes_on:
        write_config(tmp_path, {}, policies, [])
    else:
        with pytest.raises(ValueError, match=f"has answers of another '{policy}'; use another folder"):
            write_config(tmp_path, {}, policies, [])
