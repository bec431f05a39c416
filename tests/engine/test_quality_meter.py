"""The quality meter: steps of a quarter of the budget, which change no answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import KINDS, PLAIN, SEEDED, SUFFIX, counts, draft_by, mostly, said
from test_engine import assert_empty, drain, prompt, tokens
from test_faults import Graph, with_graphs
from test_layer_kinds import engine_of
from test_layer_kinds import make as make_model
from test_run_ahead import answers
from tiny_llama import write_config

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.outputs import CheckedTokens
from shadowkv.engine.scheduling import quality_meter
from shadowkv.models import loader
from shadowkv.wording import SettingsError
from tests.models.families import build

TURBO = "turbo:budget=32"

pytestmark = pytest.mark.usefixtures("packed")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads of 16 dimensions, which every policy takes."""
    return write_config(tmp_path_factory.mktemp("wide"), hidden_size=96, max_position_embeddings=2048)


def checked(engine: Engine) -> CheckedTokens:
    """What the engine's meter has counted."""
    found = engine.stats().checked
    assert found is not None
    return found


@pytest.mark.parametrize("kv", [TURBO, "turbo-host:budget=32", "quest:budget=32", "shadowkv:budget=32,outliers=0"])
def test_answers_do_not_depend_on_the_meter(make: Any, kv: str) -> None:
    """Nor log-probabilities, whatever requests ask for, also with values that are fetched from the host."""
    wanted, logprobs = said(make(kv=kv))
    engine = make(kv=kv, quality_meter=1.0)
    got, got_logprobs = said(engine)
    assert got == wanted and got_logprobs == logprobs
    assert checked(engine).tokens > 300 and checked(engine).kl / checked(engine).tokens > 1e-4


def test_answers_with_graphs_do_not_depend_on_the_meter(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are launched ahead there. A narrow step reads its tokens on the device, as the step that follows."""
    kinds = [*KINDS[:4], replace(SEEDED, max_tokens=90), replace(PLAIN, temperature=0.7, seed=3, stop_token_ids=(9,))]
    wanted = answers(make(kv=TURBO, max_num_seqs=5), kinds * 2)
    eager = make(kv=TURBO, max_num_seqs=5, quality_meter=1.0)
    engine = with_graphs(make(kv=TURBO, max_num_seqs=5, quality_meter=1.0), monkeypatch, Graph)
    assert answers(eager, kinds * 2) == answers(engine, kinds * 2) == wanted
    assert checked(engine).tokens == checked(eager).tokens > 100
    assert checked(engine).kl == pytest.approx(checked(eager).kl, rel=1e-4)
    assert_empty(engine)


def test_windows_are_as_without_the_meter(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Narrow steps write into a window's ring, and their tokens are removed from it."""
    model = make_model("gemma3_text", tmp_path_factory.mktemp("gemma3_text"))

    def said(engine: Engine) -> dict[str, list[int]]:
        for number, params in enumerate((replace(PLAIN, max_tokens=200), replace(SEEDED, max_tokens=160))):
            engine.add_request(str(number), [token % 90 for token in prompt(number, (400, 560)[number])], params)
        return {name: tokens(outputs) for name, outputs in drain(engine).items()}

    wanted = said(engine_of(model, kv=TURBO, kv_dense_below=0))
    engine = engine_of(model, kv=TURBO, kv_dense_below=0, quality_meter=1.0)
    assert said(engine) == wanted
    assert checked(engine).tokens == 199 + 159


def test_steps_with_drafts_are_checked_at_their_first_rows(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a budget of which a quarter is everything, other rows would differ."""
    wide = {"kv": "turbo:budget=2048,sampled=0.0", "max_num_seqs": 2}

    def said(engine: Engine) -> dict[str, list[int]]:
        for name, length in (("a", 450), ("b", 400)):
            engine.add_request(name, prompt(length, length), PLAIN)
        return {name: tokens(outputs) for name, outputs in drain(engine).items()}

    wanted = said(make(**wide))
    draft_by(monkeypatch, mostly(wanted))
    engine = make(**wide, quality_meter=1.0, speculative_config=SUFFIX)
    assert said(engine) == wanted
    assert min(counts(engine)) > 20 and checked(engine).tokens > 50
    assert checked(engine).kl < 1e-3 * checked(engine).tokens


def test_a_quarter_of_the_budget_is_selected(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In narrow steps, which are the given share of all steps. They leave their sequence as it was."""
    engine = make(kv="turbo:budget=64", quality_meter=0.25)
    decode, seen, selected = engine.runner.decode, list[tuple[bool, int, int]](), list[int]()

    def hook(layer: int, q: Any, batch: Any, selection: Any) -> Any:
        selected.append(int((selection.chunks >= 0).sum(-1).max()))
        return selection

    def spy(sequences: Any, *given: Any) -> Any:
        selected.clear()
        length = sequences[0].length
        logits = decode(sequences, *given)
        seen.append((given[-1] is True, length, max(selected)))
        return logits

    engine.cache.selection_hook = hook
    monkeypatch.setattr(engine.runner, "decode", spy)
    engine.add_request("a", prompt(1, 450), PLAIN)
    drain(engine)
    narrow = [(length, most) for is_narrow, length, most in seen if is_narrow]
    own = {length: most for is_narrow, length, most in seen if not is_narrow}
    assert len(own) == 149 and len(narrow) == checked(engine).tokens == 149 // 4
    assert all(most <= 16 < own[length] <= 64 for length, most in narrow)


def test_sequences_take_turns(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are more than a narrow step has."""
    monkeypatch.setattr(quality_meter, "CHECKED", 2)
    engine = make(kv=TURBO, max_num_seqs=3, quality_meter=1.0)
    requests = [engine.request(name, prompt(ord(name), 450), replace(PLAIN, max_tokens=31)) for name in "abc"]
    for request in requests:
        engine.add(request)
    drain(engine)
    assert [request.checked.tokens for request in requests] == [20, 20, 20]
    assert sum(request.checked.kl for request in requests) == pytest.approx(checked(engine).kl)


def test_sequences_without_compressed_tokens_are_not_checked(make: Any) -> None:
    engine = make(kv=TURBO, kv_dense_below=1000, quality_meter=1.0)
    engine.add_request("a", prompt(1, 300), PLAIN)
    drain(engine)
    assert checked(engine) == CheckedTokens()
    assert make(kv=TURBO).stats().checked is None


def test_a_narrow_step_without_memory_costs_the_check_alone(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, wanted, failed = make(kv=TURBO, quality_meter=1.0), make(kv=TURBO), []
    decode = engine.runner.decode

    def failing(*given: Any) -> Any:
        if given[-1] is True and len(failed) < 3:
            failed.append(given)
            raise torch.OutOfMemoryError("no memory")
        return decode(*given)

    monkeypatch.setattr(engine.runner, "decode", failing)
    for one in (engine, wanted):
        one.add_request("a", prompt(1, 450), PLAIN)
    assert tokens(drain(engine)["a"]) == tokens(drain(wanted)["a"])
    assert len(failed) == 3 and checked(engine).tokens == 146


@pytest.mark.parametrize("name", ["kl_divergence", "upload"])
def test_a_comparison_without_memory_costs_the_check_alone(
    make: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def failing(*given: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    engine, wanted = make(kv=TURBO, quality_meter=1.0), make(kv=TURBO)
    monkeypatch.setattr(quality_meter, name, failing)
    for one in (engine, wanted):
        one.add_request("a", prompt(1, 450), PLAIN)
    assert tokens(drain(engine)["a"]) == tokens(drain(wanted)["a"])
    assert checked(engine) == CheckedTokens()


def test_the_start_says_what_is_measured(make: Any) -> None:
    lines = make(kv=TURBO, quality_meter=0.03).notes
    assert any(
        line.startswith("meter   measures 3 % of the decode steps, of sequences with more than") for line in lines
    )
    assert not any(line.startswith("meter ") for line in make(kv=TURBO).notes)


@pytest.mark.parametrize("kv", ["full", "fp8", "full-speculative"])
def test_policies_that_attend_to_everything_are_refused(make: Any, kv: str) -> None:
    with pytest.raises(SettingsError, match=f"quality_meter=0.1: kv='{kv}' attends to every token; the meter needs"):
        make(kv=kv, quality_meter=0.1)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("llama", {"kv": "full", "quality_meter": 0.1}, "kv='full' attends to every token; the meter needs"),
        ("qwen3_5", {"kv": "full", "quality_meter": 0.1}, "this model has recurrent states, which the meter"),
        ("qwen3_5", {"kv": TURBO, "quality_meter": 0.1}, "this model has recurrent states, which the meter"),
        ("minimax_m3", {"kv": "turbo", "quality_meter": 0.1}, "this model's own indexer says how much a step selects"),
        ("qwen3_5", {"kv": "full-speculative"}, "this model has layers with a recurrent state, which steps that draft"),
        ("llama", {"kv": "full", "max_mamba_checkpoints": 3}, "no layer of this model has a recurrent state"),
        ("llama", {"kv": TURBO}, "a key sketch needs a head dim that is a multiple of 8, not 12"),
    ],
)
def test_settings_that_a_model_refuses_are_refused_before_its_weights_are_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    settings: dict[str, Any],
    reason: str,
    load_format: str,
) -> None:
    build(family, tmp_path, {"max_position_embeddings": 2048})

    def fail(*_: Any) -> None:
        raise AssertionError("weights are read")

    for name in ("_load", "_dummy"):
        monkeypatch.setattr(loader, name, fail)
    with pytest.raises(SettingsError, match=reason):
        Engine(EngineConfig(model=str(tmp_path), load_format=load_format, **settings))


@pytest.mark.parametrize("rate", [-0.1, 1.5])
def test_rates_are_shares(rate: float) -> None:
    with pytest.raises(SettingsError, match=f"quality_meter={rate} must be a share of steps from 0 to 1"):
        EngineConfig(quality_meter=rate)
