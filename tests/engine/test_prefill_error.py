"""``prefill_error`` where prefill is dense after all, and overrides of a config in keys of the prefix cache."""

from __future__ import annotations

from typing import Any

import pytest

from shadowkv.engine.startup.prefix_cache import RankCache, cache_key
from shadowkv.wording import SettingsError


def test_an_error_that_nothing_has_is_refused(make: Any) -> None:
    with pytest.raises(SettingsError, match=r"prefill_error=0\.1 has no meaning with prefill='dense'; prefill"):
        make(kv="shadowkv", device="cpu", prefill_error=0.1)
    assert (
        make(kv="shadowkv", device="cpu", prefill="sparse", prefill_error=0.1).cache.spec.as_dict()["prefill_error"]
        == 0.1
    )


def test_an_override_is_part_of_the_key(make: Any, loaded: Any) -> None:
    plain, other = (make(kv="full", **more) for more in ({}, {"hf_overrides": {"rms_norm_eps": 0.01}}))
    ranks = [RankCache(plain.cache.layout, form="form", weights="weights")]
    keys = [cache_key(engine.config, loaded, engine.cache, ranks) for engine in (plain, other)]
    assert keys[0] != keys[1]
    assert keys[1].model.startswith(f"{keys[0].model}-")
