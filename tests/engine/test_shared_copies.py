"""What several sequences share reaches host memory and disk, wherever they part, whichever of them is still there."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from test_engine import prompt
from test_prefix_cache import DOCUMENT, fresh
from test_tiers import OFFLOAD, POLICIES, ask
from tiers import assert_nothing_left, evict_device, evict_host, settle

from shadowkv.engine.engine import Engine


def question(seed: int) -> list[int]:
    return DOCUMENT + prompt(seed, 100)


def forget(engine: Engine) -> None:
    """Evicts what is on the device, once all copies are made."""
    settle(engine)
    evict_device(engine)


@pytest.mark.parametrize("kv", POLICIES)
def test_a_document_with_several_questions_is_there_after_a_restart(make: Any, tmp_path: Path, kv: str) -> None:
    options = {"kv": kv, "kv_disk_dir": str(tmp_path)}
    engine = make(**options)
    answers = {seed: ask(engine, question(seed))[0] for seed in (2, 3, 4)}
    settle(engine)
    engine.close()
    engine = make(**options)
    for seed in (5, 2, 3):
        evict_device(engine)
        answer, found = ask(engine, question(seed))
        assert found >= len(DOCUMENT)
        if kv == "full":
            assert answer == answers.get(seed, fresh(make, question(seed), kv=kv))
        settle(engine)
    engine.close()


@pytest.mark.parametrize("kv", POLICIES)
def test_a_chat_edited_in_its_middle_is_there_after_a_restart(make: Any, tmp_path: Path, kv: str) -> None:
    options = {"kv": kv, "kv_disk_dir": str(tmp_path), "max_cached_seqs": 4}
    engine = make(**options)
    first = question(2)
    second = first + ask(engine, first)[0] + prompt(3, 200)
    ask(engine, second)
    edited = DOCUMENT + prompt(4, 150)  # another first turn
    ask(engine, edited)
    later = edited + ask(engine, edited)[0] + prompt(5, 100)
    ask(engine, later)
    settle(engine)
    engine.close()
    for ids in (second, later, DOCUMENT + prompt(6, 10)):
        engine = make(**options)
        assert ask(engine, ids)[1] >= min(len(ids) - 160, len(DOCUMENT))
        engine.close()


@pytest.mark.parametrize("kv", POLICIES)
def test_what_lost_its_copy_is_copied_again_where_another_sequence_forks(make: Any, kv: str) -> None:
    """Without a disk what leaves host memory is gone; the sequences that have it are still there."""
    engine = make(kv=kv, kv_offload_gib=OFFLOAD)
    ask(engine, question(2))
    settle(engine)
    evict_host(engine)
    ask(engine, question(3))
    forget(engine)
    assert ask(engine, question(4))[1] >= len(DOCUMENT)
    forget(engine)
    for seed in (2, 3):
        assert ask(engine, question(seed))[1] >= len(DOCUMENT)
    forget(engine)
    assert_nothing_left(engine)


@pytest.mark.parametrize("kv", POLICIES)
def test_what_is_left_of_a_sequence_that_has_gone_is_copied(make: Any, kv: str) -> None:
    """The document was computed, and not copied, with a question that nobody has any more."""
    engine = make(kv=kv, kv_offload_gib=OFFLOAD)
    ask(engine, question(2))
    ask(engine, question(3))
    settle(engine)
    evict_host(engine)
    assert engine.scheduler.prefix_cache.evict()
    ask(engine, question(4))
    forget(engine)
    assert ask(engine, question(5))[1] >= len(DOCUMENT)
    forget(engine)
    assert_nothing_left(engine)


def test_what_the_disk_refused_is_written_when_it_is_used_again(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"kv": "turbo:values=dense,min_budget=640", "kv_disk_dir": str(tmp_path)}
    engine = make(**options)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr("shadowkv.prefix_cache.disk.writer.write_snapshot", full)
        ask(engine, question(2))
        settle(engine)
    assert not list(tmp_path.glob("*.safetensors"))
    engine.scheduler.prefix_cache.lower.disk._writer._paused_until = 0.0
    ask(engine, question(3))
    settle(engine)
    engine.close()
    engine = make(**options)
    assert ask(engine, question(4))[1] >= len(DOCUMENT)
    engine.close()
