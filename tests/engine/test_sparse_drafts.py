"""Drafts that the model makes itself: answers are those of full attention, whatever the draft steps attend to."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import KINDS, PLAIN, SEEDED, clock_of_steps, counts, said
from folding_ops import fold
from test_engine import assert_empty, drain, prompt, tokens
from test_faults import Graph, with_graphs
from test_layer_kinds import engine_of
from test_layer_kinds import make as make_model
from test_run_ahead import answers
from tiny_llama import write_config

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.speculation.gate import Account
from shadowkv.models.loader import LoadedModel
from shadowkv.wording import SettingsError

SPARSE = {"method": "sparse", "num_speculative_tokens": 6}
NARROW, WIDE = "full-speculative:budget=32", "full-speculative:budget=2048"
"""Draft steps that attend to few tokens, and to all of them."""

pytestmark = pytest.mark.usefixtures("packed")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads of 16 dimensions, which every policy takes."""
    return write_config(tmp_path_factory.mktemp("wide"), hidden_size=96, max_position_embeddings=2048)


@pytest.fixture
def make(make: Any) -> Any:
    """Engines whose answers can be compared: in a GPU's bfloat16, rounding depends on the number of rows."""
    return partial(make, dtype="float32")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates that draft whatever it costs."""
    monkeypatch.setattr(Account, "length", lambda self, drafts, *others: max(most for _, most in drafts))


def keep_time(engine: Engine, patch: pytest.MonkeyPatch, cost: float) -> None:
    """Gives decode steps a clock: a draft step takes ``cost``, another 1, and 0.01 for each row after its first."""
    clock, decode = clock_of_steps(patch), engine.runner.decode

    def timed(*given: Any) -> Any:
        logits = decode(*given)
        clock.now += cost if len(given) == 7 and given[6] else 1 + 0.01 * (len(logits) - 1)
        return logits

    patch.setattr(engine.runner, "decode", timed)


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(
    ("kv", "drafting"),
    [
        ("full", {"kv": NARROW}),
        ("fp8", {"kv": "fp8:index=sketch,chunk=1,drafts=true,budget=32", "speculative_config": SPARSE}),
    ],
)
def test_answers_are_those_of_full_attention(make: Any, kv: str, drafting: dict[str, Any]) -> None:
    """The index sees little, and is often wrong."""
    wanted, logprobs = said(make(kv=kv, max_num_seqs=40))
    engine = make(**drafting, max_num_seqs=40)
    got, got_logprobs = said(engine)
    assert got == wanted and got_logprobs == pytest.approx(logprobs, abs=1e-3)
    assert min(counts(engine)) > 200


@pytest.mark.usefixtures("opened")
def test_drafts_that_attend_to_everything_are_right(make: Any) -> None:
    """Also sampled ones: a draft takes the random numbers of the places in which its tokens are."""
    engine = make(kv=WIDE)
    for number, params in enumerate((PLAIN, SEEDED, replace(SEEDED, temperature=0.6, top_p=0.9))):
        engine.add_request(str(number), prompt(number, 450), params)
    drain(engine)
    assert counts(engine)[0] > 300 and counts(engine)[1] == 0
    stats = engine.stats().speculation
    assert stats is not None and stats.num_accepted_tokens_per_pos[0] >= stats.num_accepted_tokens_per_pos[5] > 40


@pytest.mark.usefixtures("opened")
def test_only_draft_steps_select(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a draft leaves its sequence as it was, with a page compressed if one was due."""
    engine = make(kv=NARROW)
    seen = list[tuple[bool, int, int]]()
    decode = engine.runner.decode
    selections = list[int]()

    def hook(layer: int, q: Any, batch: Any, selected: Any) -> Any:
        selections.append(layer)
        return selected

    engine.cache.selection_hook = hook

    def spy(sequences: Any, *given: Any) -> Any:
        selections.clear()
        length = sequences[0].length
        logits = decode(sequences, *given)
        seen.append((len(given) == 6 and given[5], length, len(selections)))
        return logits

    monkeypatch.setattr(engine.runner, "decode", spy)
    engine.add_request("a", prompt(1, 450), PLAIN)
    said = list[int]()
    while engine.has_work:
        said += tokens(engine.step())
        if engine.scheduler.running:
            assert engine.scheduler.running[0].sequence.length == 450 + len(said) - 1
    drafted = [(length, selected) for drafting, length, selected in seen if drafting]
    assert len(drafted) > 100 and all(selected for _, selected in drafted)
    assert not any(selected for drafting, _, selected in seen if not drafting)
    steps = [(drafting, length) for drafting, length, _ in seen]
    for (before, first), (after, second) in pairwise(steps):
        if before:
            assert second == first + 1 if after else second < first + 1, "a draft grows, a step begins where it began"


@pytest.mark.usefixtures("opened")
def test_a_draft_step_without_memory_costs_the_draft_alone(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, wanted, failed = make(kv=NARROW), make(kv="full"), []
    decode = engine.runner.decode

    def failing(*given: Any) -> Any:
        if given[-1] is True and len(failed) < 3:  # a draft step
            failed.append(given)
            raise torch.OutOfMemoryError("no memory")
        return decode(*given)

    monkeypatch.setattr(engine.runner, "decode", failing)
    for one in (engine, wanted):
        one.add_request("a", prompt(1, 450), PLAIN)
    assert tokens(drain(engine)["a"]) == tokens(drain(wanted)["a"])
    assert len(failed) == 3 and min(counts(engine)) > 0


@pytest.mark.usefixtures("opened")
def test_a_draft_step_that_fails_leaves_nothing(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(kv=NARROW)
    engine.add_request("a", prompt(1, 450), PLAIN)
    said = tokens([*engine.step(), *engine.step()])
    length, decode, calls = engine.scheduler.running[0].sequence.length, engine.runner.decode, []

    def failing(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 3:
            raise RuntimeError("a broken step")
        return decode(*given)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a broken step"):
        patch.setattr(engine.runner, "decode", failing)
        engine.step()
    assert engine.scheduler.running[0].sequence.length == length
    wanted = make(kv="full")
    wanted.add_request("a", prompt(1, 450), PLAIN)
    assert said + tokens(drain(engine)["a"]) == tokens(drain(wanted)["a"])


@pytest.mark.usefixtures("opened")
def test_a_continued_chat_is_that_of_full_attention(make: Any) -> None:
    """What draft steps have written is in no page that the prefix cache keeps, in a sequence or in a fork of it."""

    def turn(engine: Engine, text: list[int]) -> tuple[list[int], int]:
        engine.add_request("turn", text, replace(PLAIN, max_tokens=100))
        outputs = drain(engine)["turn"]
        return tokens(outputs), outputs[-1].cached_tokens

    plain, engine = make(kv="full"), make(kv=NARROW)
    first, _ = turn(plain, prompt(1, 500))
    assert turn(engine, prompt(1, 500))[0] == first
    for length, cached in ((100, 599), (13, 512)):  # all of it, and a fork
        later = [*prompt(1, 500), *first[:length], *prompt(length, 230)]
        wanted, _ = turn(make(kv="full"), later)
        got, reused = turn(engine, later)
        assert got == wanted and cached - 64 <= reused <= cached
    assert min(counts(engine)) > 50
    assert_empty(engine)


@pytest.mark.usefixtures("opened")
def test_a_chat_continues_from_host_memory(make: Any) -> None:
    """Which keeps the index beside exact keys and values."""

    def turn(engine: Engine, text: list[int]) -> tuple[list[int], int]:
        engine.add_request("turn", text, replace(PLAIN, max_tokens=60))
        outputs = drain(engine)["turn"]
        return tokens(outputs), outputs[-1].cached_tokens

    engine = make(kv=NARROW, max_cached_seqs=0, kv_offload_gib=0.05)
    first, _ = turn(engine, prompt(1, 700))
    later = [*prompt(1, 700), *first, *prompt(2, 40)]
    got, cached = turn(engine, later)
    assert cached >= 700 and got == turn(make(kv="full"), later)[0]
    assert min(counts(engine)) > 5


@pytest.mark.usefixtures("opened")
def test_answers_with_graphs_are_those_without_drafts(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape has a graph for draft steps and another for steps that attend to everything."""
    kinds = [*KINDS[:4], replace(SEEDED, max_tokens=90), replace(PLAIN, temperature=0.7, seed=3, stop_token_ids=(9,))]
    wanted = answers(make(kv="full", max_num_seqs=5), kinds * 2)
    engine = with_graphs(make(kv=NARROW, max_num_seqs=5), monkeypatch, Graph)
    assert answers(engine, kinds * 2) == wanted
    assert min(counts(engine)) > 30
    assert engine.runner.graphs is not None
    assert {key[6] for key in engine.runner.graphs.graphs if len(key) == 11} == {True, False}
    assert_empty(engine)


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize("graphs", [False, True])
def test_pages_are_read_once_for_all_rows_of_a_sequence(
    make: Any, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """By ops that can, also if some drafts end early, and beside rows of padding."""
    kinds = [*KINDS[:4], replace(SEEDED, max_tokens=90), replace(PLAIN, temperature=0.7, seed=3, stop_token_ids=(9,))]
    wanted = answers(make(kv="full", max_num_seqs=5), kinds * 2)
    engine = make(kv=NARROW, max_num_seqs=5)
    if graphs:
        engine = with_graphs(engine, monkeypatch, Graph)
    engine.runner._fused = None  # it has attention of its own
    calls = fold(engine.cache.ops, monkeypatch)
    assert answers(engine, kinds * 2) == wanted
    assert {op for op, _ in calls} == {"paged_attention", "attend_coded"}
    assert min(counts(engine)) > 30 and {most for _, most in calls} > {7}


@pytest.mark.usefixtures("opened")
def test_windows_take_draft_steps(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Draft steps write into a window's ring, and their tokens are removed from it."""
    model = make_model("gemma3_text", tmp_path_factory.mktemp("gemma3_text"))

    def said(engine: Engine) -> dict[str, list[int]]:
        for number, params in enumerate((replace(PLAIN, max_tokens=200), replace(SEEDED, max_tokens=160))):
            engine.add_request(str(number), [token % 90 for token in prompt(number, (400, 560)[number])], params)
        return {name: tokens(outputs) for name, outputs in drain(engine).items()}

    wanted = said(engine_of(model, dtype="float32", kv="full", kv_dense_below=0))
    engine = engine_of(model, dtype="float32", kv=NARROW, kv_dense_below=0)
    assert said(engine) == wanted
    assert counts(engine)[0] > 50


def test_the_gate_closes_where_drafts_do_not_pay(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock on which a draft step takes as long as one that attends to everything, or a tenth of it."""

    def drafted(cost: float) -> tuple[int, int]:
        engine = make(kv=WIDE)
        keep_time(engine, monkeypatch, cost)
        for name in ("a", "b"):
            engine.add_request(name, prompt(ord(name), 450), replace(PLAIN, max_tokens=200))
        drain(engine)
        drafting = engine.decode_steps.speculation
        assert drafting is not None
        return drafting.stats.num_draft_tokens, drafting.stats.num_drafts

    assert drafted(1.0)[0] < 20
    few, rounds = drafted(0.1)
    assert few > 250 and few / rounds > 3


@pytest.mark.usefixtures("opened")
def test_draft_steps_are_no_time_of_the_step(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a prompt in a step without drafts would seem to cost nothing, and prompts would get all the time."""
    engine = make(kv=WIDE)
    keep_time(engine, monkeypatch, 0.5)
    engine.add_request("a", prompt(1, 450), PLAIN)
    seen = set[float]()
    while engine.has_work:
        engine.step()
        seen.add(engine.decode_steps.seconds)
    assert max(seen) == pytest.approx(1.06), "a step with six drafted tokens"


def test_sequences_without_compressed_tokens_draft_nothing(make: Any) -> None:
    """Each draft step would attend to everything. The line of the start says how long sequences have to be."""
    engine = make(kv=WIDE, kv_dense_below=1000)
    (line,) = (note for note in engine.notes if note.startswith("drafts"))
    assert line.startswith("drafts  sparse, up to ") and line.endswith("with more than 999 tokens (--kv-dense-below)")
    engine.add_request("a", prompt(1, 300), PLAIN)
    drain(engine)
    assert counts(engine) == (0, 0)
    never = make(kv=WIDE, kv_dense_below=3000)
    assert any(note.endswith(": none, as max_model_len is 2048") for note in never.notes)


def test_a_policy_is_given_the_index_that_drafts_need() -> None:
    by_name, by_method = EngineConfig(kv="full-speculative"), EngineConfig(kv="full", speculative_config=SPARSE)
    assert by_name.spec() == by_method.spec() and by_name.speculation == by_method.speculation
    assert by_name.max_rows == by_method.max_rows >= by_name.max_num_seqs * 7
    spec = EngineConfig(kv="fp8", speculative_config=SPARSE).spec()
    assert (spec.keys, spec.values, spec.index, spec.drafts, spec.selects) == ("fp8", "fp8", "sketch", True, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv": "turbo", "speculative_config": SPARSE}, "kv='turbo' selects tokens in every step"),
        ({"kv": "full-speculative", "speculative_config": {"method": "suffix"}}, "drafts of method='sparse' alone"),
        ({"kv": "full:drafts=true", "speculative_config": SPARSE}, "needs an index that selects for drafts"),
        ({"kv": "kvarn", "speculative_config": SPARSE}, f"kv='kvarn', speculative_config={SPARSE}: this KV policy"),
        ({"kv": "full-speculative:outliers=3"}, "outliers=3 have no meaning"),
        ({"kv": "full-speculative:place=host"}, "values must be on the device, not the host"),
    ],
)
def test_policies_that_do_not_fit_are_refused(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match="kv=") as refused:
        make(**options)
    assert message in str(refused.value)


@pytest.mark.usefixtures("opened")
def test_a_trained_model_drafts_well_and_answers_as_full_attention(loaded: LoadedModel) -> None:
    """Draft steps attend to an eighth of the tokens, of prose that comes with Python."""
    topics = import_module("pydoc_data.topics").topics
    text = loaded.tokenizer.encode("\n".join(topics[name] for name in sorted(topics))[:8000])[:1200]
    assert len(text) == 1200
    params = replace(PLAIN, max_tokens=40)

    def said(kv: str) -> tuple[list[int], Engine]:
        engine = Engine(EngineConfig(kv=kv, kv_dense_below=0, max_num_seqs=2, max_model_len=2048), loaded)
        engine.add_request("a", text, params)
        return tokens(drain(engine)["a"]), engine

    wanted, _ = said("full")
    got, engine = said("full-speculative:budget=144")
    assert got == wanted
    accepted, rejected = counts(engine)
    assert accepted > rejected
