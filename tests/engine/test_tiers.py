"""Prompts that were computed once come back from host memory and from disk, after a restart too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from test_engine import GREEDY, drain, prompt, tokens
from test_prefix_cache import DOCUMENT, cached, fresh
from tiers import assert_nothing_left, evict_device, settle

from shadowkv.engine.engine import Engine
from shadowkv.kvcache.spec import PAGE

POLICIES = ["full", "turbo:values=dense", "turbo:dense_below=900,values=dense", "turbo-host:values=dense", "quest"]
OFFLOAD = 0.0625


def ask(engine: Engine, ids: list[int], params: Any = GREEDY) -> tuple[list[int], int]:
    """Answer and cached tokens of one request."""
    engine.add_request("x", ids, params)
    outputs = drain(engine)
    return tokens(outputs["x"]), cached(outputs)["x"]


@pytest.mark.parametrize("kv", POLICIES)
def test_what_left_the_device_comes_back_from_host_memory(make: Any, kv: str) -> None:
    engine = make(kv=kv, kv_offload_gib=OFFLOAD)
    ask(engine, DOCUMENT + prompt(2, 100))
    settle(engine)
    for seed in (3, 4):
        answers = []
        for _ in range(2):
            evict_device(engine)
            answer, found = ask(engine, DOCUMENT + prompt(seed, 100))
            assert found >= len(DOCUMENT)
            answers.append(answer)
            settle(engine)
        if kv == "full":
            assert answers[0] == fresh(make, DOCUMENT + prompt(seed, 100), kv=kv)
    assert engine.scheduler.prefix_cache.counts.hit_tokens["host"] >= 4 * len(DOCUMENT)
    evict_device(engine)
    engine.close()


@pytest.mark.parametrize("kv", POLICIES)
def test_a_conversation_goes_on_after_a_restart(make: Any, tmp_path: Path, kv: str) -> None:
    history, found = list(DOCUMENT), []
    for turn in range(3):
        engine = make(kv=kv, kv_disk_dir=str(tmp_path / "cache"))
        history += prompt(turn, 150)
        answer, cached_tokens = ask(engine, history)
        if kv == "full":
            assert answer == fresh(make, history, kv=kv)
        found.append(cached_tokens)
        history += answer
        settle(engine)
        engine.close()
    lengths = [0, len(DOCUMENT) + 150 + 8, len(DOCUMENT) + 2 * 158]
    if kv == "turbo:dense_below=900,values=dense":
        lengths[2] = lengths[1]  # the second turn was compressed when it came to 900 tokens, or not
    assert found[0] == 0
    assert all(length - 3 * PAGE < tokens_ for length, tokens_ in zip(lengths[1:], found[1:], strict=True)), found
    assert os.stat(tmp_path / "cache").st_mode & 0o777 == 0o700


def test_other_salts_find_nothing_in_any_tier(make: Any, tmp_path: Path) -> None:
    from dataclasses import replace

    options = {"kv": "full", "kv_disk_dir": str(tmp_path)}
    engine = make(**options)
    mine, other = replace(GREEDY, cache_salt="mine"), replace(GREEDY, cache_salt="other")
    ask(engine, DOCUMENT + [5], mine)
    settle(engine)
    evict_device(engine)
    assert ask(engine, DOCUMENT + [5], other)[1] == ask(engine, DOCUMENT + [5])[1] == 0
    engine.close()
    engine = make(**options)
    assert ask(engine, DOCUMENT + [6], replace(GREEDY, cache_salt="third"))[1] == 0
    assert ask(engine, DOCUMENT + [6], mine)[1] == len(DOCUMENT)
    engine.close()


@pytest.mark.parametrize("harm", ["cut", "flip", "remove"])
def test_a_harmed_file_is_never_served(make: Any, tmp_path: Path, harm: str) -> None:
    options = {"kv": "turbo:values=dense", "kv_disk_dir": str(tmp_path)}
    engine, ids = make(**options), DOCUMENT + prompt(2, 100)
    ask(engine, ids)
    settle(engine)
    engine.close()
    wanted = fresh(make, ids, kv=options["kv"])
    engine = make(**options)
    while engine.scheduler.prefix_cache.opening:
        pass
    for file in tmp_path.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        if harm == "remove":
            file.unlink()
        else:
            file.write_bytes(data[:-100] if harm == "cut" else data)
    assert ask(engine, ids) == (wanted, 0)
    settle(engine)
    assert ask(engine, ids)[1] > 0
    evict_device(engine)
    engine.close()


def test_little_host_memory_is_used_again(make: Any) -> None:
    """Eight prompts through room for about two: nothing leaks, the last ones are found."""
    engine = make(kv="full", kv_offload_gib=24 / 1024, max_cached_seqs=0)
    for seed in range(8):
        ask(engine, prompt(seed, 900))
        settle(engine)
    evict_device(engine)
    assert engine.scheduler.prefix_cache.counts.host_evictions > 0
    assert ask(engine, prompt(7, 900) + [1])[1] == 896
    evict_device(engine)
    assert ask(engine, prompt(0, 900) + [1])[1] == 0
    settle(engine)
    assert_nothing_left(engine)


def test_a_directory_that_cannot_be_used_is_named(make: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--kv-disk-dir .*file cannot be used: "):
        make(kv="full", kv_disk_dir=str(tmp_path / "file"))
