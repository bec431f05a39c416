"""Tiers below the device with tensor parallelism: every rank copies its part, and a copy is complete or not there."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import test_layer_kinds
import torch
from safetensors.torch import load_file, save_file
from test_engine import GREEDY, drain, prompt, tokens
from test_prefix_cache import DOCUMENT
from test_tensor_parallel import engine_of, workers, write_heads
from test_tiers_faults import QUESTION, on
from tiers import assert_nothing_left, evict_device, evict_host, settle

sys.path.append(str(Path(__file__).parents[1] / "prefix_cache"))

sys.path.append(str(Path(__file__).parents[1] / "models"))

from families import build
from faulty_disks import FullDisk, HeldDisk

from shadowkv.engine.engine import Engine
from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.parallel.ranks import Ranks
from shadowkv.kvcache.memory.arenas import OutOfBlocks
from shadowkv.kvcache.snapshots.layers import Reading
from shadowkv.kvcache.snapshots.snapshots import Snapshots
from shadowkv.layers.group import RankFailure
from shadowkv.prefix_cache.disk.filesystem import FileSystem
from shadowkv.prefix_cache.protocol import NotDone, Saved, UnusableName

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks meet through gloo")

Answered = tuple[list[int], list[float], int]
"""Tokens of an answer, their log-probabilities, and how many tokens of the prompt were cached."""


@pytest.fixture(scope="module")
def model(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_heads(tiny, tmp_path_factory.mktemp("heads"))


def ask(engine: Engine, ids: list[int]) -> Answered:
    engine.add_request("x", ids, GREEDY)
    outputs = drain(engine)["x"]
    settle(engine)
    chances = [one.logprob for output in outputs for one in output.logprobs or []]
    return tokens(outputs), chances, outputs[-1].cached_tokens


@contextmanager
def tiers_of(model: Path, size: int = 2, **options: Any) -> Iterator[Engine]:
    """An engine that knows what its directory has. At its end nothing may be left in its tiers."""
    with engine_of(model, size, **{"kv": "full", **options}) as engine:
        while engine.scheduler.prefix_cache.opening:
            pass
        yield engine
        settle(engine)
        assert_nothing_left(engine)


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[int]:
    """The answer of one rank, which computes all of the prompt."""
    with engine_of(model, 1, kv="full") as engine:
        return ask(engine, QUESTION)[0]


@pytest.mark.parametrize(
    ("size", "kv"), [(2, "full"), (2, "shadowkv:place=device"), (3, "turbo:values=dense,min_budget=640")]
)
def test_every_tier_answers_as_the_device(model: Path, tmp_path: Path, size: int, kv: str) -> None:
    """Ranks have 6 and 3 query heads, or 3 each."""
    options = {"kv": kv, "kv_disk_dir": str(tmp_path)}
    with tiers_of(model, size, **options) as engine:
        ask(engine, DOCUMENT + prompt(3, 100))
        expected = ask(engine, QUESTION)
        assert expected[2] >= len(DOCUMENT)
        for forget in (lambda _: None, evict_host):
            evict_device(engine)
            forget(engine)
            assert ask(engine, QUESTION)[0] == expected[0]
        assert engine.stats().prefixes["disk"].restores
    with tiers_of(model, size, **options) as engine:
        found = ask(engine, QUESTION)
        assert found[0] == expected[0] and found[2] >= len(DOCUMENT)
        assert engine.stats().prefixes["disk"].hit_tokens == found[2]


def test_values_in_host_memory_are_copied_too(tiny: Path, tmp_path: Path) -> None:
    """Of a model with as many kv heads on every rank."""
    options = {"kv": "turbo-host:values=dense", "kv_disk_dir": str(tmp_path), "load_format": "dummy"}
    with tiers_of(tiny, **options) as engine:
        ask(engine, DOCUMENT + prompt(3, 100))
        expected = ask(engine, QUESTION)
    with tiers_of(tiny, **options) as engine:
        found = ask(engine, QUESTION)
        assert found[0] == expected[0] and found[2] >= len(DOCUMENT)


def test_windows_are_copied_too(tmp_path: Path) -> None:
    files, _ = test_layer_kinds.make("gemma3_text", tmp_path / "model")
    with engine_of(files, 1, kv="full") as engine:
        expected = ask(engine, QUESTION)
    with tiers_of(files, kv_disk_dir=str(tmp_path / "cache")) as engine:
        ask(engine, QUESTION[:-60])
    with tiers_of(files, kv_disk_dir=str(tmp_path / "cache")) as engine:
        found = ask(engine, QUESTION)
        assert found[0] == expected[0] and found[2] >= len(DOCUMENT)


@pytest.mark.parametrize("checkpoints", [None, 1])
def test_recurrent_states_are_copied_too(checkpoints: int | None, tmp_path: Path) -> None:
    """Also of prompts that come together, of which one checkpoint at a time can be read."""
    build("qwen3_5", tmp_path / "model", {"max_position_embeddings": 2048, "head_dim": 16, "vocab_size": 300})
    pages, model = len(DOCUMENT) // 64 * 64, tmp_path / "model"
    options = {"max_mamba_checkpoints": checkpoints, "kv_disk_dir": str(tmp_path / "cache")}
    questions = [DOCUMENT[:pages] + prompt(seed, 70) for seed in (4, 5, 6)]
    with engine_of(model, 1, kv="full", enable_prefix_caching=False) as engine:
        expected = [ask(engine, question)[0] for question in questions]
    with tiers_of(model, **options) as engine:
        ask(engine, [*DOCUMENT[:pages], 7])
        for number, question in enumerate(questions):
            engine.add_request(str(number), question, GREEDY)
        outputs = drain(engine)
        assert [tokens(outputs[str(number)]) for number in range(3)] == expected
        settle(engine)
        evict_device(engine)
        found = ask(engine, questions[0])
        assert found[0] == expected[0] and found[2] >= pages
    with tiers_of(model, **options) as engine:
        found = ask(engine, [*questions[1], 9])
        assert found[2] >= pages and engine.stats().prefixes["disk"].hit_tokens == found[2]


def test_a_copy_has_all_heads_once(model: Path) -> None:
    """--kv-offload-gib is for all ranks together, and as many bytes are copied and restored as with one rank."""
    found = []
    for size in (1, 2):
        with tiers_of(model, size, kv_offload_gib=0.0625) as engine:
            ask(engine, QUESTION)
            evict_device(engine)
            ask(engine, QUESTION)
            host = engine.stats().prefixes["host"]
            found.append((host.total_bytes, host.copied_bytes, host.restored_bytes, host.hit_tokens))
    assert found[0] == found[1]


def test_little_host_memory_is_used_again(model: Path) -> None:
    """Eight prompts through room for three: the last one is found, the first one is not. Without room the next is not
    copied."""
    with tiers_of(model, kv_offload_gib=12 / 1024) as engine:
        for seed in range(8):
            ask(engine, prompt(seed, 900))
            evict_device(engine)
        assert engine.stats().prefixes["host"].evictions == 5
        assert [ask(engine, prompt(seed, 900) + [1])[2] for seed in (7, 0)] == [896, 0]
        evict_device(engine)
        evict_host(engine)
        host = engine.scheduler.prefix_cache.lower.copies.host
        taken = host.take(host.total_bytes)
        assert taken is not None
        ask(engine, prompt(9, 900))
        assert engine.stats().prefixes["host"].refused
        host.give(taken)


def test_a_harmed_file_is_never_served(model: Path, tmp_path: Path, wanted: list[int]) -> None:
    """Cut, or with another bit in either rank's part. It is written again when the prompt is computed."""
    with tiers_of(model, kv_disk_dir=str(tmp_path)) as engine:
        ask(engine, QUESTION)
        (copy,) = (node.copy for node in engine.scheduler.prefix_cache._tree if node.copy is not None)
        assert copy.parts[0] == 2 * copy.parts[1]
        rank_1 = -4 * len(copy.token_ids) - copy.parts[1]  # where its part begins, from the file's end
        for number, at in enumerate((None, rank_1 - 10, rank_1 + 10), 1):
            evict_device(engine)
            evict_host(engine)
            (file,) = tmp_path.glob("*.safetensors")
            data = bytearray(file.read_bytes())
            if at is not None:
                data[at] ^= 4
            file.write_bytes(data[:rank_1] if at is None else data)
            assert ask(engine, QUESTION)[::2] == (wanted, 0)
            assert engine.stats().prefixes["disk"].corrupt == number
        evict_device(engine)
        evict_host(engine)
        assert ask(engine, QUESTION)[::2] == (wanted, 704)


def test_files_of_other_numbers_of_ranks_are_counted_and_stay(model: Path, tmp_path: Path, wanted: list[int]) -> None:
    found = []
    for size in (2, 1, 3, 2):
        with tiers_of(model, size, kv_disk_dir=str(tmp_path)) as engine:
            other_files = engine.stats().prefixes["disk"].other_files
            answer = ask(engine, QUESTION)
            assert answer[0] == wanted
            found.append((answer[2], other_files, len(list(tmp_path.glob("*.safetensors")))))
    assert found == [(0, 0, 1), (0, 1, 2), (0, 2, 3), (704, 2, 3)]


@pytest.mark.parametrize("late", [False, True])
def test_a_full_disk_is_done_without(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: list[int], late: bool
) -> None:
    """It has room for one rank's part, but not for both."""
    on(monkeypatch, FullDisk(tmp_path, 2**20, late))
    with tiers_of(model, kv_disk_dir=str(tmp_path)) as engine:
        for cached in (0, 704):
            found = ask(engine, QUESTION)
            assert (found[0], found[2]) == (wanted, cached)
            evict_device(engine)
        disk = engine.stats().prefixes["disk"]
        assert disk.write_errors == 1 and not disk.used_bytes
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("when", ["copying", "writing"])
def test_a_rank_that_dies_leaves_whole_snapshots_or_none(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: list[int], when: str
) -> None:
    """It dies before it has answered that its part is copied, or while the file is written."""
    disk = HeldDisk("write") if when == "writing" else FileSystem()
    on(monkeypatch, disk)
    with monkeypatch.context() as patch, engine_of(model, 2, kv="full", kv_disk_dir=str(tmp_path)) as engine:
        if when == "copying":
            patch.setattr(Ranks, "_take_answer", lambda self, answer: None)
        engine.add_request("x", QUESTION, GREEDY)
        drain(engine)
        while isinstance(disk, HeldDisk) and not disk.reached.is_set():
            engine.step()
        assert engine.settling
        (rank,) = workers()
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(RankFailure, match=r"rank 1 has ended \(SIGKILL"):
            while True:
                engine.step()
        if isinstance(disk, HeldDisk):
            disk.go_on.set()
    complete = list(tmp_path.iterdir())
    assert [file.suffix for file in complete] == ([".safetensors"] if when == "writing" else [])
    with tiers_of(model, kv_disk_dir=str(tmp_path)) as engine:
        found = ask(engine, QUESTION)
        assert (found[0], found[2]) == (wanted, 704 if complete else 0)
        assert not engine.stats().prefixes["disk"].corrupt


def no_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("no memory left")


def no_blocks(*_: Any, **__: Any) -> Any:
    raise OutOfBlocks("there are none")


PLACES: dict[str, tuple[type, str]] = {
    "open": (Snapshots, "open_reading"),
    "read": (Reading, "read_layer"),
    "restore": (Snapshots, "restore"),
}


def harm(runner: Runner, _: list[Any], ranks: tuple[int, ...], place: str, fault: Any = no_memory) -> None:
    """Lets ``place`` fail on some ranks from now on. Every rank calls it."""
    if runner.model.group.rank in ranks:
        owner, name = PLACES[place]
        setattr(owner, f"{name}_before", getattr(owner, name))
        setattr(owner, name, fault)


def heal(runner: Runner, _: list[Any], ranks: tuple[int, ...], place: str) -> None:
    """Ends what ``harm`` did."""
    if runner.model.group.rank in ranks:
        owner, name = PLACES[place]
        setattr(owner, name, getattr(owner, f"{name}_before"))


def test_what_one_rank_cannot_copy_is_not_there(model: Path, wanted: list[int]) -> None:
    with tiers_of(model, kv_offload_gib=0.0625) as engine:
        alone = itertools.product(((0,), (1,)), ("open", "read"), (no_memory,))
        for ranks, place, fault in (*alone, ((0, 1), "open", no_blocks)):
            engine.runner.collective_rpc(harm, [], ranks, place, fault)
            for _ in range(2):
                assert ask(engine, QUESTION)[::2] == (wanted, 0)
                evict_device(engine)
                assert engine.stats().prefixes["host"].used_bytes == 0
            engine.runner.collective_rpc(heal, [], ranks, place)
        ask(engine, QUESTION)
        evict_device(engine)
        assert ask(engine, QUESTION)[::2] == (wanted, 704)


def test_what_one_rank_cannot_restore_ends_all(model: Path) -> None:
    """The others have the sequence then."""
    with engine_of(model, 2, kv="full", kv_offload_gib=0.0625) as engine:
        ask(engine, QUESTION)
        evict_device(engine)
        engine.runner.collective_rpc(harm, [], (1,), "restore")
        with pytest.raises(RankFailure, match="tensor-parallel rank 1 failed: OutOfMemoryError: no memory left"):
            ask(engine, QUESTION)


@pytest.mark.parametrize("way", ["down", "up"])
def test_ranks_that_expect_other_bytes_of_a_part_end_all(model: Path, way: str) -> None:
    """They would read and write each other's parts."""
    with engine_of(model, 2, kv="full", kv_offload_gib=0.0625) as engine:
        copies = engine.scheduler.prefix_cache.lower.copies
        if way == "down":
            parts = copies.parts
            copies.parts = lambda header: (parts(header)[0], parts(header)[1] - 256)
        else:
            ask(engine, QUESTION)
            evict_device(engine)
            for copy in copies.by_uid.values():
                copy.parts = (copy.parts[0], copy.parts[1] - 256)
        with pytest.raises(RankFailure, match=r"rank 1 failed: RuntimeError: .*part .* has \d+ bytes, and rank 0"):
            ask(engine, QUESTION)


def outcome(engine: Engine, begin: Callable[[Future[Saved]], None]) -> Saved:
    answer = Future[Saved]()
    begin(answer)
    while not answer.done():
        engine.step()
    return answer.result()


def test_prompts_are_saved_by_name(model: Path, tmp_path: Path, wanted: list[int]) -> None:
    with tiers_of(model, kv_disk_dir=str(tmp_path)) as engine:
        ask(engine, QUESTION)
        pages, saves = engine.requests.pages(QUESTION, None), engine.saves
        assert saves is not None
        saved = outcome(engine, lambda answer: saves.save("manual", pages, answer))
        assert saved.tokens == 704 and saved.nbytes == engine.stats().prefixes["disk"].pinned_bytes
    with tiers_of(model, kv_disk_dir=str(tmp_path)) as engine:
        saves = engine.saves
        assert saves is not None
        assert outcome(engine, lambda answer: saves.restore("manual", answer)).tokens == 704
        assert engine.stats().prefixes["host"].used_bytes
        assert ask(engine, QUESTION)[::2] == (wanted, 704)
    with tiers_of(model, 3, kv_disk_dir=str(tmp_path)) as engine:
        saves = engine.saves
        assert saves is not None
        with pytest.raises(UnusableName, match="is of another model, policy or number of GPUs"):
            outcome(engine, lambda answer: saves.restore("manual", answer))


def test_what_a_rank_still_reads_is_not_evicted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiers_of(model, kv_offload_gib=0.0625) as engine:
        ask(engine, QUESTION)
        evict_device(engine)
        (copy,) = (node.copy for node in engine.scheduler.prefix_cache._tree)
        assert copy is not None and not copy.users
        take, held = Ranks._take_answer, list[tuple[Ranks, Any]]()
        monkeypatch.setattr(Ranks, "_take_answer", lambda ranks, answer: held.append((ranks, answer)))
        engine.add_request("x", QUESTION, GREEDY)
        drain(engine)
        while not held:
            engine.step()
        engine.step()
        assert copy.users == 1 and engine.settling
        monkeypatch.undo()
        for ranks, answer in held:
            take(ranks, answer)
        settle(engine)
        assert not copy.users


def test_weights_of_any_rank_make_another_key(model: Path, tmp_path: Path) -> None:
    """Of the last kv head, which rank 1 has."""
    other = tmp_path / "other"
    shutil.copytree(model, other)
    weights = load_file(other / "model.safetensors")
    weights["model.layers.0.self_attn.v_proj.weight"][-1] += 1
    save_file(weights, other / "model.safetensors")
    for files in (model, other):
        with tiers_of(files, kv_disk_dir=str(tmp_path / "cache")) as engine:
            assert ask(engine, QUESTION)[2] == 0
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 2


def test_a_save_that_a_rank_cannot_copy_is_answered(model: Path, tmp_path: Path) -> None:
    with tiers_of(model, kv_disk_dir=str(tmp_path)) as engine:
        engine.runner.collective_rpc(harm, [], (1,), "read")
        ask(engine, QUESTION)
        pages, saves = engine.requests.pages(QUESTION, None), engine.saves
        assert saves is not None
        with pytest.raises(NotDone, match="704 cached tokens could not be written"):
            outcome(engine, lambda answer: saves.save("manual", pages, answer))
