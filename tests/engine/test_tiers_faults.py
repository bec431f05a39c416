"""Disks and memory that fail: requests are served from what is left, and nothing leaks."""

from __future__ import annotations

import asyncio
import errno
import shutil
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine import GREEDY, drain, prompt, tokens
from test_prefix_cache import DOCUMENT, fresh
from test_tiers import ask
from tiers import assert_nothing_left, evict_device, evict_host, settle

sys.path.append(str(Path(__file__).parents[1] / "prefix_cache"))

from faulty_disks import HELD_SECONDS, BrokenDisk, FullDisk, HeldDisk, ReadOnlyDisk, SlowDisk

from shadowkv import LLM
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.request import EngineDead
from shadowkv.engine.scheduling.scheduler import Leader, Sharing
from shadowkv.kvcache.memory.arenas import OutOfBlocks
from shadowkv.prefix_cache.chains import RETRY_SECONDS
from shadowkv.prefix_cache.disk.filesystem import FileSystem
from tests.local_engine import LocalEngine

QUESTION = DOCUMENT + prompt(2, 100)


def on(monkeypatch: pytest.MonkeyPatch, disk: Any) -> None:
    """Engines made from now on reach the disk so."""
    monkeypatch.setattr("shadowkv.prefix_cache.disk.tier.FileSystem", lambda: disk)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("shadowkv")]


def ask_and_forget(engine: Engine, ids: list[int], wanted: list[int]) -> int:
    """Answers a prompt with nothing of it on the device; how many tokens were cached."""
    evict_device(engine)
    answer, found = ask(engine, ids)
    assert answer == wanted
    settle(engine)
    return found


def filled(make: Any, directory: Path) -> None:
    """Makes a directory with the snapshots of a question."""
    engine = make(kv="full", kv_disk_dir=str(directory))
    ask(engine, QUESTION)
    settle(engine)
    engine.close()
    assert list(directory.glob("*.safetensors"))


def opened_on_files(make: Any, directory: Path) -> Engine:
    """An engine that knows the snapshots of a question from another one's directory."""
    filled(make, directory)
    engine: Engine = make(kv="full", kv_disk_dir=str(directory))
    while engine.scheduler.prefix_cache.opening:
        pass
    return engine


@pytest.mark.parametrize("disk", ["full", "full late", "read-only", "removed"])
def test_a_disk_that_takes_nothing_is_done_without(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, disk: str
) -> None:
    wanted, directory = fresh(make, QUESTION, kv="full"), tmp_path / "cache"
    if disk == "read-only":
        on(monkeypatch, ReadOnlyDisk(errno.EROFS))
    elif disk != "removed":
        on(monkeypatch, FullDisk(directory, 10_000, late=disk == "full late"))
    engine = make(kv="full", kv_disk_dir=str(directory))
    assert ask_and_forget(engine, QUESTION, wanted) == 0
    if disk == "removed":
        shutil.rmtree(directory)
    for seed in range(3):
        ask(engine, prompt(seed, 300))
    settle(engine)
    assert ask_and_forget(engine, QUESTION, wanted) >= len(DOCUMENT), "it is in host memory"
    evict_host(engine)
    assert ask_and_forget(engine, QUESTION, wanted) == 0
    assert sum("nothing is stored there" in line for line in lines(caplog)) == 1, lines(caplog)
    assert_nothing_left(engine)
    engine.close()


def test_a_disk_that_cannot_be_read_is_done_without(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = fresh(make, QUESTION, kv="full")
    disk = FileSystem()
    on(monkeypatch, disk)
    engine = opened_on_files(make, tmp_path)
    monkeypatch.setattr(disk, "read", BrokenDisk().read)
    assert ask_and_forget(engine, QUESTION, wanted) == 0
    assert sum("cannot be read" in line for line in lines(caplog)) == 1
    assert_nothing_left(engine)
    engine.close()


def test_a_disk_that_could_not_be_read_is_asked_again_later(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = fresh(make, QUESTION, kv="full")
    disk = FileSystem()
    on(monkeypatch, disk)
    engine = opened_on_files(make, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "read", BrokenDisk().read)
        assert ask_and_forget(engine, QUESTION, wanted) == 0
    evict_host(engine)
    assert ask_and_forget(engine, QUESTION, wanted) == 0, "not at once"
    evict_host(engine)
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + RETRY_SECONDS)
    assert ask_and_forget(engine, QUESTION, wanted) >= len(DOCUMENT)
    assert_nothing_left(engine)
    engine.close()


def test_a_slow_disk_is_waited_for_beside_others(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = fresh(make, QUESTION, kv="full")
    filled(make, tmp_path)
    on(monkeypatch, SlowDisk(0.02))
    engine = make(kv="full", kv_disk_dir=str(tmp_path))
    engine.add_request("slow", QUESTION, GREEDY)
    engine.add_request("other", prompt(9, 50), GREEDY)
    outputs = drain(engine)
    assert tokens(outputs["slow"]) == wanted
    assert outputs["slow"][-1].cached_tokens > 0
    settle(engine)
    assert_nothing_left(engine)
    engine.close()


def test_a_disk_that_hangs_is_not_waited_for(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = fresh(make, QUESTION, kv="full")
    filled(make, tmp_path)
    disk = HeldDisk("open")
    disk.go_on.set()
    on(monkeypatch, disk)
    engine = make(kv="full", kv_disk_dir=str(tmp_path))
    while engine.scheduler.prefix_cache.opening:
        pass
    disk.go_on.clear()
    monkeypatch.setattr("shadowkv.prefix_cache.chains.Speeds.computing_seconds", lambda _, tokens: tokens * 1e-3)
    monkeypatch.setattr("shadowkv.prefix_cache.chains.FETCH_SECONDS", 1.0)
    began = time.monotonic()
    engine.add_request("x", QUESTION, GREEDY)
    outputs = drain(engine)
    assert 0.5 < time.monotonic() - began < HELD_SECONDS / 2
    assert (tokens(outputs["x"]), outputs["x"][-1].cached_tokens) == (wanted, 0)
    disk.go_on.set()
    settle(engine)
    assert_nothing_left(engine)
    engine.close()


def test_waiting_for_the_directory_keeps_no_processor_busy(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = HeldDisk("names")
    on(monkeypatch, disk)
    engine = make(kv="full", kv_disk_dir=str(tmp_path))
    engine.add_request("x", QUESTION, GREEDY)
    steps, until = 0, time.monotonic() + 0.3
    while time.monotonic() < until:
        assert not engine.step()
        steps += 1
    assert steps < 200
    disk.go_on.set()
    drain(engine)
    settle(engine)
    engine.close()


def test_files_of_other_models_are_nobodys_business(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(make, tmp_path)
    engine = make(kv="turbo:values=dense,min_budget=640", kv_disk_dir=str(tmp_path))
    assert ask(engine, QUESTION)[1] == 0
    settle(engine)
    assert not lines(caplog)
    engine.close()


def test_prompts_computed_twice_are_both_known(make: Any, tmp_path: Path) -> None:
    """Two copies of the same tokens, of which the first goes to the disk: that is found again."""
    engine = make(kv="full", kv_disk_dir=str(tmp_path))
    for name in "ab":
        engine.add_request(name, QUESTION, replace(GREEDY, prompt_logprobs=0, max_tokens=1))
    drain(engine)
    settle(engine)
    evict_device(engine)
    evict_host(engine)
    assert ask(engine, QUESTION)[1] >= len(DOCUMENT)
    settle(engine)
    assert_nothing_left(engine)
    engine.close()


def no_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("no memory left")


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("nobody has thought of this")


def out_of_pages(*_: Any, **__: Any) -> Any:
    raise OutOfBlocks("there are none")


@pytest.mark.parametrize(
    "place",
    ["open_reading", "kvcache.snapshots.layers.Reading.read_layer", "restore", "prefix_cache.host.Mover.up"],
)
@pytest.mark.parametrize("fault", [no_memory, out_of_pages, broken])
def test_what_fails_between_tiers_costs_no_request(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str, fault: Any
) -> None:
    wanted = fresh(make, QUESTION, kv="full")
    engine = make(kv="full", kv_offload_gib=0.0625)
    with monkeypatch.context() as patch:
        if "." in place:
            patch.setattr(f"shadowkv.{place}", fault)
        else:
            patch.setattr(engine.cache.snapshots, place, fault)
        for _ in range(2):
            assert ask_and_forget(engine, QUESTION, wanted) == 0
    # Where too many checkpoints are read, copies are refused, and counted instead of logged.
    assert bool(lines(caplog)) == ((place, fault) != ("open_reading", out_of_pages))
    evict_device(engine)
    assert engine.cache.free == engine.cache.total
    assert ask(engine, QUESTION)[0] == wanted
    settle(engine)
    if fault is no_memory:
        assert ask_and_forget(engine, QUESTION, wanted) >= len(DOCUMENT)
    if engine.scheduler.prefix_cache.lower is not None:
        assert_nothing_left(engine)
    engine.close()


def test_what_is_restored_is_given_back_where_its_places_cannot_be_told(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = fresh(make, QUESTION, kv="full")
    engine = make(kv="full", kv_offload_gib=0.0625)
    ask(engine, QUESTION)
    settle(engine)
    monkeypatch.setattr("shadowkv.kvcache.snapshots.snapshots.Restoring", no_memory)
    assert ask_and_forget(engine, QUESTION, wanted) == 0
    assert_nothing_left(engine)


def test_what_is_not_copied_when_an_engine_ends_is_let_go(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(kv="full", kv_offload_gib=0.0625)
    monkeypatch.setattr(engine.scheduler.prefix_cache.lower.offload, "advance", lambda limit: None)
    ask(engine, QUESTION)
    evict_device(engine)
    assert engine.cache.free != engine.cache.total
    engine.scheduler.prefix_cache.lower.close(0.01)
    assert_nothing_left(engine)


def test_an_llm_writes_its_files_at_the_end(tiny: Path, tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    options: dict[str, Any] = {"load_format": "dummy", "kv": "full", "kv_disk_dir": str(directory)}
    with LLM(str(tiny), **options) as llm:
        (first,) = llm.generate([QUESTION], GREEDY)
    with LLM(str(tiny), **options) as llm:
        (second,) = llm.generate([QUESTION], GREEDY)
    assert (first.outputs, first.num_cached_tokens) == (second.outputs, 0)
    assert second.num_cached_tokens >= len(DOCUMENT)


def test_a_thousand_that_wait_for_one_document_are_soon_looked_through(make: Any) -> None:
    engine = make(kv="full")
    document = prompt(1, 60_000)
    requests = []
    first = replace(engine.request("0", [5], GREEDY), prompt_token_ids=document)
    for number in range(1024):
        pages = engine.request(str(number), [5], GREEDY).prompt.pages if not requests else requests[0].prompt.pages
        prompt_ = type(first.prompt)(document, pages.extend_to(document))
        requests.append(replace(first, request_id=str(number), prompt=prompt_))
    began, sharing, leader = time.thread_time(), Sharing(requests), Leader(requests[0].prompt, 30_000)
    assert all(sharing.waits(number, 0, leader) for number in range(1024))
    assert not sharing.waits(0, 60_000, leader)
    assert time.thread_time() - began < 2  # it takes 0.01, and each against each other a thousand times that


def test_clients_of_a_server_that_ends_do_not_wait_for_its_disk(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LocalEngine(EngineConfig(model=str(tiny), load_format="dummy", kv="full"))
    written = threading.Event()
    monkeypatch.setattr(engine.engine, "close", lambda: written.wait(300))
    engine.start()

    async def told() -> None:
        outputs = engine.generate([engine.request(QUESTION, replace(GREEDY, max_tokens=1000))])
        await anext(outputs)
        engine.shutdown(0)
        with pytest.raises(EngineDead):
            async for _ in outputs:
                pass

    asyncio.run(asyncio.wait_for(told(), 120))
    written.set()
    engine.shutdown(120)
    assert not engine.is_alive
