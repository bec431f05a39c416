"""Prompts that were computed once come back from host memory and from disk, after a restart too."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from test_engine import GREEDY, drain, prompt, tokens
from test_prefix_cache import DOCUMENT, cached, fresh
from tiers import assert_nothing_left, evict_device, settle

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.kvcache.policy.spec import PAGE

POLICIES = [
    "full",
    "turbo:values=dense,min_budget=640",
    "turbo:dense_below=900,values=dense,min_budget=640",
    "turbo-host:values=dense",
    "quest",
]
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
    assert engine.scheduler.prefix_cache.stats()["host"].hit_tokens >= 4 * len(DOCUMENT)
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
    if kv == "turbo:dense_below=900,values=dense,min_budget=640":
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
    options = {"kv": "turbo:values=dense,min_budget=640", "kv_disk_dir": str(tmp_path)}
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
    assert engine.scheduler.prefix_cache.stats()["host"].evictions > 0
    assert ask(engine, prompt(7, 900) + [1])[1] == 896
    evict_device(engine)
    assert ask(engine, prompt(0, 900) + [1])[1] == 0
    settle(engine)
    assert_nothing_left(engine)


def test_a_directory_that_cannot_be_used_is_named(make: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    # Before a model is loaded.
    with pytest.raises(ValueError, match=r"kv_disk_dir='.*file' cannot be used: "):
        Engine(EngineConfig(model="no such model", kv_disk_dir=str(tmp_path / "file")))


def test_what_the_tiers_did_is_counted(make: Any, tmp_path: Path) -> None:
    engine = make(kv="full", kv_offload_gib=OFFLOAD, kv_disk_dir=str(tmp_path))
    assert all(one.used_bytes == 0 < one.total_bytes for one in engine.stats().prefixes.values())
    ask(engine, DOCUMENT + [1])
    settle(engine)
    ask(engine, DOCUMENT + [2])
    settle(engine)
    stats = engine.stats().prefixes
    assert [one.hit_tokens for one in stats.values()] == [len(DOCUMENT), 0, 0]
    assert 0 < stats["device"].used_bytes == engine.stats().tiers["device"].used_bytes
    slab = 2**22
    assert stats["host"].copied_bytes <= stats["host"].used_bytes < stats["host"].copied_bytes + slab
    assert 0 < stats["host"].copied_bytes < stats["disk"].copied_bytes == stats["disk"].used_bytes
    evict_device(engine)
    assert engine.stats().prefixes["device"].evictions == 1  # the second request went on with the first one's
    ask(engine, DOCUMENT + [3])
    settle(engine)
    host = engine.stats().prefixes["host"]
    assert (host.hit_tokens, host.restores, host.evictions, host.refused) == (len(DOCUMENT), 1, 0, 0)
    assert host.restored_bytes == host.copied_bytes and host.restore_seconds > 0
    engine.close()
    engine = make(kv="full", kv_disk_dir=str(tmp_path))
    ask(engine, DOCUMENT + [4])
    disk = engine.stats().prefixes["disk"]
    assert (disk.hit_tokens, disk.restores, disk.corrupt, disk.write_errors) == (len(DOCUMENT), 1, 0, 0)
    assert disk.restored_bytes == host.copied_bytes and disk.restore_seconds > 0
    engine.close()


def test_a_copy_that_there_is_no_room_for_is_counted(make: Any) -> None:
    engine = make(kv="full", kv_offload_gib=OFFLOAD)
    host = engine.scheduler.prefix_cache.lower.copies.host
    host.take(host.total_bytes)
    ask(engine, DOCUMENT + [1])
    settle(engine)
    stats = engine.stats().prefixes["host"]
    # When its prompt was computed, and again when it ended.
    assert (stats.refused, stats.copied_bytes, stats.used_bytes) == (2, 0, stats.total_bytes)


@pytest.mark.parametrize("kv", [*POLICIES, "shadowkv"])
def test_staging_holds_a_layer_of_any_snapshot(make: Any, kv: str) -> None:
    engine = make(kv=kv, kv_offload_gib=OFFLOAD)
    for length in (100, 700, 2000):
        answer, _ = ask(engine, prompt(length, length))
        ask(engine, prompt(length, length) + answer + prompt(1, 30))
        settle(engine)
        tree = engine.scheduler.prefix_cache._tree
        sizes = [node.copy.header.layer_bytes for node in tree if node.copy]
        assert max(sizes) <= engine.cache.layout.snapshot_layer_bytes(2048)
        if length == 2000:
            assert engine.cache.layout.snapshot_layer_bytes(2048) < 2 * max(sizes)


def test_more_host_memory_than_is_free_is_refused(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowkv.engine.startup.sizing.free_host_bytes", lambda: 2**30 - 1)
    told = r"^copies of cached prompts would take 1\.00 GiB of host memory, 1\.00 GiB is free\. {} kv_offload_gib$"
    with pytest.raises(MemoryError, match=told.format("Lower")):
        make(kv="full", kv_offload_gib=1.0)
    with pytest.raises(MemoryError, match=told.format("Set")):
        make(kv="full", kv_disk_dir=str(tmp_path))
    settings = {"kv": "shadowkv:budget=256", "max_num_seqs": 30, "gpu_memory_utilization": 1.0, "host_memory_gib": 1.0}
    taken = make(**settings).stats().tiers["host"].total_bytes
    monkeypatch.setattr("shadowkv.engine.startup.sizing.free_host_bytes", lambda: taken + 2**26)
    make(**settings, kv_offload_gib=0.0625)
    monkeypatch.setattr("shadowkv.engine.startup.sizing.free_host_bytes", lambda: taken + 2**26 - 1)
    told = r"is free beside the 64\.00 MiB for copies of cached prompts\. Lower host_memory_gib or kv_offload_gib"
    with pytest.raises(MemoryError, match=told):
        make(**settings, kv_offload_gib=0.0625)


def test_start_up_lines_name_the_tiers(make: Any, tmp_path: Path) -> None:
    def line(**options: Any) -> str:
        engine = make(kv="full", **options)
        engine.close()
        (found,) = (note for note in engine.notes if note.startswith("cache   "))
        return found.removeprefix("cache   ")

    assert line() == "prefixes on the device"
    assert line(enable_prefix_caching=False) == "no prefixes"
    assert line(kv_offload_gib=OFFLOAD) == "prefixes on the device, 0.06 GiB of host memory (lru)"
    disk = f"2.00 GiB in {tmp_path}"
    wanted = f"prefixes on the device, 0.06 GiB of host memory (graph), {disk}"
    assert line(kv_offload_gib=OFFLOAD, kv_disk_dir=str(tmp_path), kv_disk_gib=2.0, eviction="graph") == wanted
    wanted = f"prefixes on the device, 1.00 GiB of host memory (lru), {disk}"
    assert line(kv_disk_dir=str(tmp_path), kv_disk_gib=2.0) == wanted


@pytest.mark.parametrize("layers", [2, 3])
def test_policies_that_skip_layers_answer_as_before_from_every_tier(tiny: Path, tmp_path: Path, layers: int) -> None:
    """With all layers skipped they answer as `full` does; else layers differ in bytes, in memory and in files."""
    config = {**json.loads((tiny / "config.json").read_text()), "num_hidden_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def open_engine(kv: str) -> Engine:
        disk = None if kv == "full" else str(tmp_path / "cache")
        options = {"max_num_seqs": 2, "max_cached_seqs": 2, "kv_dense_below": 0, "kv_disk_dir": disk}
        return Engine(EngineConfig(model=str(tmp_path), load_format="dummy", kv=kv, **options))

    question = DOCUMENT + prompt(3, 100)
    engine = open_engine("turbo:values=dense,skip_layers=1,min_budget=640")
    computed = ask(engine, question)
    settle(engine)
    evict_device(engine)
    from_host, cached_tokens = ask(engine, question)
    assert computed[1] == 0 and cached_tokens >= len(DOCUMENT)
    assert engine.scheduler.prefix_cache.stats()["host"].hit_tokens == cached_tokens
    settle(engine)
    engine.close()
    engine = open_engine("turbo:values=dense,skip_layers=1,min_budget=640")
    assert ask(engine, question) == (from_host, cached_tokens)
    assert engine.scheduler.prefix_cache.stats()["disk"].hit_tokens == cached_tokens
    engine.close()
    if layers == 2:
        assert computed[0] == from_host == ask(open_engine("full"), question)[0]
