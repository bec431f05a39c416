"""Models with recurrent states: prompts are found at their checkpoints in every tier, and answered as if computed
anew."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from test_engine import GREEDY, drain, prompt
from test_layer_kinds import ask
from test_tiers_machine import Serving
from tiers import assert_nothing_left, evict_device, settle

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.kvcache.recurrent import states
from shadowkv.prefix_cache.__main__ import main
from shadowkv.prefix_cache.host import Place
from shadowkv.wording import SettingsError, counted

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from families import build

EVERY = 128


@pytest.fixture
def hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Makes engines of a small model with random weights, with checkpoints every ``EVERY`` tokens."""
    monkeypatch.setattr(states, "CHECKPOINT_EVERY", EVERY)
    build("qwen3_5", tmp_path / "model", {"max_position_embeddings": 2048, "head_dim": 16, "vocab_size": 300})

    def make(**options: Any) -> Engine:
        fields = {"kv": "full", "max_num_seqs": 4, "max_cached_seqs": 4, "kv_dense_below": 0, **options}
        return Engine(EngineConfig(model=str(tmp_path / "model"), dtype="float32", **fields))

    return make


@pytest.mark.parametrize("kv, states", [("full", "float32"), ("turbo", "float32"), ("full", "bfloat16")])
def test_questions_begin_at_the_last_checkpoint_of_a_document(
    hybrid: Any, kv: str, states: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The document alone was no prompt. Answers do not depend on the tier in which it is found."""
    document = prompt(0, 420)
    asked = [document + prompt(seed, 90) for seed in (1, 2, 3)]
    options = {"kv": kv, "mamba_ssm_cache_dtype": states}
    below = {**options, "kv_offload_gib": 0.0625, "kv_disk_dir": str(tmp_path / "disk")}
    engine = hybrid(**options)
    on_device = [ask(engine, text) for text in asked]
    assert [cached for _, cached in on_device] == [0, 384, 384]
    if options == {"kv": "full", "mamba_ssm_cache_dtype": "float32"}:
        engine = hybrid(enable_prefix_caching=False)
        assert [answer for answer, _ in on_device] == [ask(engine, text)[0] for text in asked]
    engine = hybrid(**below)
    assert ask(engine, asked[0]) == on_device[0]
    settle(engine)
    evict_device(engine)
    assert ask(engine, asked[1]) == on_device[1]
    prefixes = engine.scheduler.prefix_cache
    assert prefixes.stats()["host"].hit_tokens == 384
    settle(engine)
    copies = [node.copy for node in prefixes._tree if node.end <= 6]
    assert sorted(copy.header.length for copy in copies) == [128, 256, 384]
    assert all(header.fields for copy in copies for header in copy.header.of_groups), "each holds the state at its end"
    engine.close()
    engine = hybrid(**below)
    assert ask(engine, asked[2]) == on_device[2]
    assert engine.scheduler.prefix_cache.stats()["disk"].hit_tokens == 384
    settle(engine)
    assert_nothing_left(engine)
    assert engine.cache.use()["recurrent_states"].used_bytes == 0
    engine.close()
    assert main(["ls", "--dir", str(tmp_path / "disk"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {0, 128, 256, 384} == {row["start"] for row in rows}
    assert {row["state_bytes"] for row in rows} == {layer_bytes(engine) * 3}
    engine = hybrid(**{**below, "mamba_ssm_cache_dtype": {"float32": "bfloat16"}.get(states, "float32")})
    assert ask(engine, asked[2])[1] == 0, "files have states of another type"
    engine.close()


@pytest.mark.parametrize("checkpoints, found", [(None, 384), (4, 384), (1, 0), (0, 0)])
def test_checkpoints_are_as_many_as_the_flag_says(hybrid: Any, checkpoints: int | None, found: int) -> None:
    """A finished sequence goes on in any case. Another question about its document needs a checkpoint."""
    engine = hybrid(max_mamba_checkpoints=checkpoints)
    count = 8 if checkpoints is None else checkpoints
    states = engine.cache.recurrent
    assert states.total_bytes == (2 * 8 + count) * states.layout.state_bytes
    assert any(line.startswith("states ") and f" for {counted(count, 'checkpoint')}" in line for line in engine.notes)
    document = prompt(0, 420)
    first = document + prompt(1, 90)
    answer, _ = ask(engine, first)
    assert ask(engine, [*first, *answer, *prompt(3, 20)])[1] == len(first) + len(answer) - 1
    assert ask(engine, document + prompt(2, 90))[1] == found
    assert engine.stats().checkpoint_bytes <= (count + 8) * states.layout.state_bytes


def test_states_in_bfloat16_take_half_the_memory(hybrid: Any) -> None:
    """But not the last inputs of convolutions, which are a small part."""
    for dtype, itemsize in (("auto", 4), ("float32", 4), ("bfloat16", 2)):
        engine = hybrid(mamba_ssm_cache_dtype=dtype)
        states, name = engine.cache.recurrent, {2: "bfloat16"}.get(itemsize, "float32")
        of_convolution = 4 * (2 * 2 * 16 + 4 * 8) * 3
        assert states.layout.state_bytes == 3 * (of_convolution + itemsize * 4 * 16 * 8)
        assert states.total_bytes == sum(array[:, :-1].nbytes for array in states.arrays.values())
        assert any(f"keep a recurrent state in {name}: " in line for line in engine.notes)


@pytest.mark.parametrize("caching", [False, True])
def test_no_checkpoint_is_written_that_no_prompt_can_use(hybrid: Any, caching: bool) -> None:
    """Without prefix caching, and of prompts that stay out of it."""
    engine = hybrid(enable_prefix_caching=caching)
    engine.add_request("x", prompt(0, 420), replace(GREEDY, cache_prompt=not caching))
    engine.step()
    assert engine.num_running == 1 and engine.stats().checkpoint_bytes == 0
    states = engine.cache.recurrent
    assert states.total_bytes == (2 * 8 + (8 if caching else 0)) * states.layout.state_bytes
    if caching:
        engine.add_request("y", prompt(0, 420), GREEDY)
        engine.step()
        assert engine.stats().checkpoint_bytes > 0
    drain(engine)


def test_what_no_memory_is_reserved_for_is_not_copied(hybrid: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A finished sequence of whole pages leaves a checkpoint when it goes on. Its copy counts as refused."""
    engine = hybrid(max_mamba_checkpoints=0, kv_offload_gib=0.0625)
    caplog.clear()
    first = prompt(0, 320 - GREEDY.max_tokens + 1)
    answer, _ = ask(engine, first)
    assert ask(engine, [*first, *answer, *prompt(1, 10)])[1] == 320
    settle(engine)
    host = engine.scheduler.prefix_cache.stats()["host"]
    assert host.refused and not host.used_bytes and not caplog.messages
    engine.close()


def test_a_snapshot_without_a_state_is_copied_at_once(hybrid: Any) -> None:
    """A yield of 0 bytes would say that layers are still on their way. (A GPU's copies are.)"""
    engine = hybrid(kv_offload_gib=0.0625, device="cpu")
    ask(engine, prompt(0, 320))
    lower, (sequence,) = engine.scheduler.prefix_cache.lower, engine.scheduler.prefix_cache._kept
    mover, host = lower.chains._mover, lower.copies.host
    with mover.open(sequence, 0, 64) as reading:
        header = reading.header
        assert not header.of_groups[-1].fields, "no checkpoint is there"
        slabs = host.take(header.nbytes)
        assert slabs is not None and all(mover.down(reading, Place(slabs, (header.nbytes,))))
        host.give(slabs)
    engine.close()


def layer_bytes(engine: Engine) -> int:
    """Bytes of a state in one layer of a snapshot."""
    layout = engine.cache.layout.recurrent
    assert layout is not None
    return layout.layer_bytes


@pytest.mark.parametrize("kv, examples", [("full", 40), ("turbo:dense_below=256,values=dense,min_budget=640", 12)])
def test_answers_are_those_of_computing_anew_and_nothing_leaks(hybrid: Any, kv: str, examples: int) -> None:
    class Hybrid(Serving):
        def teardown(self) -> None:
            engine = self.engine
            super().teardown()
            assert engine is None or engine.cache.use()["recurrent_states"].used_bytes == 0

    answers: dict[Any, Any] = {}
    limits = settings(
        max_examples=examples, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(lambda: Hybrid(hybrid, kv, answers), settings=limits)


@pytest.mark.parametrize("option", [{"max_mamba_checkpoints": 4}, {"mamba_ssm_cache_dtype": "bfloat16"}])
def test_settings_of_states_are_refused_for_models_without_them(make: Any, option: dict[str, Any]) -> None:
    ((name, value),) = option.items()
    with pytest.raises(SettingsError, match=f"^{name}={value!r}: no layer of this model has a recurrent state"):
        make(kv="full", **option)
