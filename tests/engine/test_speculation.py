"""Steps with drafts give the answers of steps without, whatever is drafted."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import KINDS, PLAIN, SEEDED, SUFFIX, clock_of_steps, counts, draft_by, mostly, said
from test_engine import GREEDY, assert_empty, drain, prompt, tokens
from test_faults import Graph, with_graphs
from test_layer_kinds import engine_of
from test_layer_kinds import make as make_model
from test_run_ahead import answers, note_steps_ahead
from tiny_llama import write_config

from shadowkv import SamplingParams
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.execution import cuda_graphs
from shadowkv.engine.outputs import TokenOutput
from shadowkv.engine.speculation.gate import Account, Gate
from shadowkv.kvcache.decode import planning
from shadowkv.wording import SettingsError
from tests.models.families import build


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads of 16 dimensions, which every policy takes."""
    return write_config(tmp_path_factory.mktemp("wide"), hidden_size=96, max_position_embeddings=2048)


@pytest.fixture
def make(make: Any) -> Any:
    """Engines whose answers can be compared: in a GPU's bfloat16, rounding depends on the number of rows."""
    return partial(make, dtype="float32")


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("kv", ["full", "fp8", "shadowkv:budget=0.5", "turbo:budget=0.5", "turbo-host:budget=0.5"])
def test_answers_are_those_without_drafts(make: Any, monkeypatch: pytest.MonkeyPatch, kv: str) -> None:
    """With prompts that are compressed at once and later, whatever else is asked for, beside requests that are
    aborted."""
    options = {"kv": kv, "fetch_buffer": 0.0, "max_num_seqs": 40}
    wanted, logprobs = said(make(**options))
    draft_by(monkeypatch, mostly({name: ids for name, (ids, _) in wanted.items()}))
    engine = make(**options, speculative_config={**SUFFIX, "num_speculative_tokens": 40})
    got, got_logprobs = said(engine)
    assert got == wanted and got_logprobs == pytest.approx(logprobs, abs=1e-3)
    assert len(logprobs) == 80
    accepted, rejected = counts(engine)
    assert accepted > 500 and rejected > 100


def test_requests_that_come_and_go_are_answered_alike(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = answers(make(kv="full"), KINDS * 2)
    draft_by(monkeypatch, mostly(wanted[0]))
    engine = make(kv="full", speculative_config={**SUFFIX, "num_speculative_tokens": 9})
    assert "drafts  suffix, up to 9 tokens of a sequence in a step" in engine.notes
    assert answers(engine, KINDS * 2) == wanted
    assert min(counts(engine)) > 100
    assert_empty(engine)


@pytest.mark.parametrize("kv", ["full", "turbo:rank=8,budget=64"])
def test_a_step_without_memory_for_its_draft_is_made_without(
    make: Any, monkeypatch: pytest.MonkeyPatch, kv: str
) -> None:
    wanted = answers(make(kv=kv), KINDS)
    draft_by(monkeypatch, mostly(wanted[0]))
    engine, failed = make(kv=kv, speculative_config=SUFFIX), []
    step = engine.runner.step

    def short(*given: Any) -> torch.Tensor:
        hidden: torch.Tensor = step(*given)
        if len(hidden) > len(engine.scheduler.running) and len(failed) < 5:
            failed.append(len(hidden))
            raise torch.OutOfMemoryError("no memory")
        return hidden

    monkeypatch.setattr(engine.runner, "step", short)
    assert answers(engine, KINDS) == wanted
    assert len(failed) == 5 and min(counts(engine)) > 50
    assert_empty(engine)


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_a_step_makes_as_many_tokens_as_are_right(make: Any, monkeypatch: pytest.MonkeyPatch, right: float) -> None:
    (plain := make(kv="full")).add_request("a", prompt(1, 70), PLAIN)
    wanted = tokens(drain(plain)["a"])
    draft_by(monkeypatch, mostly({"a": wanted}, right))
    (engine := make(kv="full", speculative_config=SUFFIX)).add_request("a", prompt(1, 70), PLAIN)
    steps = 0
    said: list[int] = []
    while engine.has_work:
        said += tokens(engine.step())
        steps += 1
        if engine.scheduler.running:
            assert engine.scheduler.running[0].sequence.length == 70 + len(said) - 1
    assert said == wanted
    assert steps in (range(22, 26) if right else range(140, 153))


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "gpt_oss"])
def test_windows_keep_what_rows_with_drafts_need(
    family: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window's ring goes around, and drafts that go into its next page are removed."""
    directory = tmp_path_factory.mktemp(family)
    if family == "gpt_oss":  # with sinks
        model = directory, build(family, directory, {"max_position_embeddings": 1024, "vocab_size": 300})
    else:
        model = make_model(family, directory)
    params = {"a": replace(PLAIN, max_tokens=300), "b": replace(SEEDED, max_tokens=260), "c": PLAIN}

    def said(engine: Engine) -> dict[str, list[int]]:
        for number, (name, one) in enumerate(params.items()):
            engine.add_request(name, [token % 90 for token in prompt(number, (5, 130, 300)[number])], one)
        return {name: tokens(outputs) for name, outputs in drain(engine).items()}

    wanted = said(engine_of(model, dtype="float32"))
    draft_by(monkeypatch, mostly(wanted))
    engine = engine_of(model, dtype="float32", speculative_config={**SUFFIX, "num_speculative_tokens": 40})
    assert said(engine) == wanted
    assert min(counts(engine)) > 50
    for output in (engine, engine_of(model, dtype="float32")):  # what is left in the prefix cache is what was said
        text = [token % 90 for token in prompt(1, 130)] + wanted["b"]
        output.add_request("next", text + [5] * 9, PLAIN)
        wanted.setdefault("next", following := tokens(drain(output)["next"]))
        assert following == wanted["next"]


def test_grammars_hold_along_a_draft(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its masks come in time or late: a held row drops the rest of its draft."""
    params = replace(SEEDED, ignore_eos=False, json_schema='{"type": "array", "items": {"type": "integer"}}')

    def said(engine: Engine) -> dict[str, tuple[list[int], str | None]]:
        for name, seed in (("a", 1), ("b", 2), ("c", 3)):
            engine.add_request(name, prompt(seed, 30), replace(params, seed=seed, logprobs=0 if name == "c" else None))
        return {name: (tokens(outputs), outputs[-1].finish_reason) for name, outputs in drain(engine).items()}

    wanted = said(make(kv="full"))
    draft_by(monkeypatch, mostly({name: ids for name, (ids, _) in wanted.items()}))
    engine = make(kv="full", speculative_config=SUFFIX)
    assert said(engine) == wanted
    assert min(counts(engine)) > 5
    for seconds in ("RULES_SECONDS", "IDLE_SECONDS"):
        monkeypatch.setattr(f"shadowkv.engine.scheduling.held_rows.{seconds}", 0.0)
    engine = make(kv="full", speculative_config=SUFFIX)
    assert said(engine) == wanted
    assert_empty(engine)


def test_draws_follow_the_models_distribution(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chi-square of 4,000 answers of three tokens out of four, without seeds, with the same draft in all of them."""
    few, text = (10, 20, 30, 40), prompt(5, 20)
    params = SamplingParams(max_tokens=3, temperature=1.0, allowed_token_ids=few, ignore_eos=True)
    plain = make(kv="full")

    def chances(before: tuple[int, ...]) -> list[float]:
        asked = replace(params, max_tokens=1, logprob_token_ids=few)
        plain.add_request("one", [*text, *before], asked)
        (output,) = drain(plain)["one"]
        assert output.logprobs is not None
        weights = torch.tensor([output.logprobs[0].top[token] for token in few], dtype=torch.float64).softmax(0)
        return weights.tolist()

    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        expected = {
            (*before, token): chance * own
            for before, chance in expected.items()
            for token, own in zip(few, chances(before), strict=True)
        }
    draft_by(monkeypatch, lambda request: [10, 20, 30][len(request.output_token_ids) :])
    engine = make(kv="full", max_num_seqs=100, speculative_config=SUFFIX, seed=3)
    seen: Counter[tuple[int, ...]] = Counter()
    for batch in range(100):
        for number in range(40):
            engine.add_request(f"{batch}-{number}", text, params)
        seen.update(tuple(tokens(outputs)) for outputs in drain(engine).values())
    assert min(counts(engine)) > 300
    total = sum(seen.values())
    square = sum((seen[said] - total * chance) ** 2 / (total * chance) for said, chance in expected.items())
    assert square < 103.4  # of 63 degrees of freedom: exceeded by chance once in 1,000


def test_drafts_end_before_the_next_compression(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token sees what it would see in a step of its own, so pages are compressed at the same lengths."""
    options = {"kv": "turbo:budget=0.5", "fetch_buffer": 0.0}

    def pages(engine: Engine) -> tuple[list[int], set[tuple[int, int]]]:
        engine.add_request("a", prompt(1, 450), PLAIN)
        seen, said = set[tuple[int, int]](), list[int]()
        plan = engine.cache.plan_decode

        def watched(*given: Any) -> Any:
            made = plan(*given)
            for length, compressed in zip(made.groups[0].sequences.length, made.groups[0].sequences.compressed):
                seen.add((int(length), int(compressed)))
            return made

        monkeypatch.setattr(engine.cache, "plan_decode", watched)
        while engine.has_work:
            said += tokens(engine.step())
        return said, seen

    wanted, lengths = pages(make(**options))
    draft_by(monkeypatch, mostly({"a": wanted}, 1.0))
    got, drafted = pages(make(**options, speculative_config={**SUFFIX, "num_speculative_tokens": 40}))
    assert (got, {pair for pair in drafted if pair[0] < 450 + 149}) == (wanted, lengths)
    assert len({compressed for _, compressed in lengths}) > 2


def test_an_abort_and_a_stop_leave_nothing_of_a_draft(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_by(monkeypatch, lambda request: [5] * 6)
    engine = make(kv="turbo:budget=0.5", fetch_buffer=0.0, speculative_config=SUFFIX)
    for name in ("a", "b", "c"):
        engine.add_request(name, prompt(ord(name), 300), PLAIN)
    while len(engine.scheduler.running) < 3:
        engine.step()
    engine.step()
    engine.abort("a")
    engine.stop("b")
    assert engine.num_running == 1
    drain(engine)
    assert_empty(engine)


def test_a_continued_chat_is_that_of_a_fresh_engine(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What rejected drafts have written is in no page that the prefix cache keeps."""
    plain = make(kv="full")

    def turn(engine: Engine, text: list[int]) -> tuple[list[int], TokenOutput]:
        engine.add_request("turn", text, replace(PLAIN, max_tokens=100))
        outputs = drain(engine)["turn"]
        return tokens(outputs), outputs[-1]

    first, _ = turn(plain, prompt(1, 100))
    later = [*prompt(1, 100), *first, *prompt(2, 30)]
    wanted, _ = turn(make(kv="full"), later)
    draft_by(monkeypatch, mostly({"turn": first}, 0.5))
    engine = make(kv="full", speculative_config=SUFFIX)
    assert turn(engine, prompt(1, 100))[0] == first
    said, last = turn(engine, later)
    assert said == wanted and last.cached_tokens == 199


def test_text_that_repeats_is_drafted_and_other_text_is_not(make: Any) -> None:
    """By the real drafter and gate: a random model that may only say two tokens soon repeats itself."""
    engine = make(kv="full", speculative_config=SUFFIX)
    engine.add_request("a", prompt(1, 50), replace(PLAIN, allowed_token_ids=(4, 5)))
    drain(engine)
    accepted, _ = counts(engine)
    engine.add_request("b", prompt(2, 50), SEEDED)
    drain(engine)
    of_both, rejected = counts(engine)
    assert accepted > 50 and of_both - accepted < 10 and rejected < 40
    assert engine.stats().speculation == engine.decode_steps.speculation.stats
    per_place = engine.decode_steps.speculation.stats.num_accepted_tokens_per_pos
    assert sum(per_place) == of_both and sorted(per_place, reverse=True) == per_place


def test_a_step_ahead_goes_on_where_nothing_matches(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make(kv="full")
    plain.add_request("a", prompt(1, 30), SEEDED)
    wanted = tokens(drain(plain)["a"])
    engine = make(kv="full", speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    engine.decode_steps.run_ahead = True
    ahead = note_steps_ahead(engine, monkeypatch)
    engine.add_request("a", prompt(1, 30), SEEDED)
    assert tokens(drain(engine)["a"]) == wanted
    assert ahead.count(True) > 100
    engine.add_request("b", prompt(1, 30), replace(PLAIN, logit_bias={}))
    engine.add_request("c", [4, 5, 6, 7, 8, 9] * 5, replace(PLAIN, max_tokens=20))
    drain(engine)
    assert counts(engine)[0] + counts(engine)[1] > 0
    assert_empty(engine)


@pytest.fixture
def clocked(make: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine that drafts from the text, on a clock on which a step takes 1, and the host 0.25 where a step is not
    launched ahead."""
    clock = clock_of_steps(monkeypatch)
    engine = make(kv="full", speculative_config=SUFFIX)
    engine.decode_steps.run_ahead, decode = True, engine.runner.decode
    drafting = engine.decode_steps.speculation
    assert drafting is not None
    drafts = drafting.drafts

    def timed(*given: Any) -> Any:
        clock.now += 1
        return decode(*given)

    def slow(*given: Any) -> Any:
        clock.now += 0.25
        return drafts(*given)

    monkeypatch.setattr(engine.runner, "decode", timed)
    monkeypatch.setattr(drafting, "drafts", slow)
    return engine


def test_the_wait_for_a_draft_is_part_of_its_steps_time(clocked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with drafts costs the waits before and after it. Where the host chooses tokens, every step waits."""
    draft_by(monkeypatch, lambda request: [5] * (len(request.output_token_ids) % 3))
    drafting, taken = clocked.decode_steps.speculation, list[tuple[int, float]]()
    monkeypatch.setattr(drafting, "took", lambda lengths, rows, seconds: taken.append((rows, seconds)))
    for params, wait in ((PLAIN, 0.25), (replace(PLAIN, repetition_penalty=1.3), 0.0)):
        clocked.add_request("a", prompt(1, 30), replace(params, max_tokens=30))
        drain(clocked)
        assert {seconds for rows, seconds in taken if rows > 1} == {1 + wait, 1 + 2 * wait}  # the latter: one alone
        assert {seconds for rows, seconds in taken if rows == 1} == {1.0}
        taken.clear()


@pytest.mark.parametrize("is_trial", [False, True])
def test_a_wait_after_which_nothing_is_drafted_is_a_loss(
    clocked: Any, monkeypatch: pytest.MonkeyPatch, is_trial: bool
) -> None:
    """Of the kind that the expected draft would have been. Every fifth token ends a match that the one before had."""
    draft_by(monkeypatch, lambda request: [5] * (len(request.output_token_ids) % 5 == 2))
    lost = list[tuple[bool, float]]()
    monkeypatch.setattr(Account, "_lose", lambda self, trial, cost: lost.append((trial, cost)))
    waiting = Gate.waiting

    def expected(gate: Gate) -> Any:
        gate._account._is_trial = is_trial
        book = waiting(gate)
        gate._account._is_trial = not is_trial  # as of another draft that was asked for since
        return book

    monkeypatch.setattr(Gate, "waiting", expected)
    clocked.add_request("a", prompt(1, 30), replace(PLAIN, max_tokens=30))
    drain(clocked)
    assert lost == 6 * [(is_trial, 0.25)]


def test_drafts_of_one_long_sequence_with_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with windows read pages row by row, the others once for all rows. All have as many rows in a graph."""
    monkeypatch.setattr(planning, "MIN_EXACT_PAGES", 4)
    model = make_model("gemma3_text", tmp_path)
    asked = [token % 90 for token in prompt(1, 400)]

    def answer(engine: Engine) -> list[int]:
        engine.add_request("a", asked, replace(PLAIN, max_tokens=60))
        return tokens(drain(engine)["a"])

    wanted = answer(engine_of(model, dtype="float32"))
    right = mostly({"a": wanted})
    draft_by(monkeypatch, lambda request: right(request)[: len(request.output_token_ids) % 7])
    engine = with_graphs(engine_of(model, dtype="float32", speculative_config=SUFFIX), monkeypatch, Graph)
    rounded, starts = engine.cache.rounded, set[bool]()

    def spy(*given: Any) -> Any:
        plan = rounded(*given)
        assert len({group.shape[0] for group in plan.groups}) == 1
        starts.update(group.starts is not None for group in plan.groups if plan.num_rows > 1)
        return plan

    monkeypatch.setattr(engine.cache, "rounded", spy)
    assert answer(engine) == wanted
    assert starts == {False, True} and min(counts(engine)) > 5
    assert_empty(engine)


@pytest.mark.parametrize("kv", ["full", "turbo:budget=0.5"])
def test_answers_with_graphs_and_steps_ahead_are_those_without_drafts(
    make: Any, monkeypatch: pytest.MonkeyPatch, kv: str
) -> None:
    """Steps with drafts and steps launched ahead follow one another, in graphs of many numbers of rows."""
    options = {"kv": kv, "fetch_buffer": 0.0, "max_num_seqs": 5}
    kinds = [*KINDS[:4], replace(SEEDED, max_tokens=90), replace(PLAIN, temperature=0.7, seed=3, stop_token_ids=(9,))]
    wanted = answers(make(**options), kinds * 2)
    right = mostly(wanted[0])
    draw = random.Random(1)
    draft_by(monkeypatch, lambda request: right(request) if draw.random() < 0.2 else [])
    engine = with_graphs(make(**options, speculative_config=SUFFIX), monkeypatch, Graph)
    ahead = note_steps_ahead(engine, monkeypatch)
    assert answers(engine, kinds * 2) == wanted
    assert min(counts(engine)) > 30 and min(ahead.count(True), ahead.count(False)) > 30
    assert max(key[0] for key in engine.runner.graphs.graphs) > 6
    assert_empty(engine)


def test_times_are_of_steps_as_they_will_be(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the eager steps before a capture and the capture itself, and without the host's choice of tokens. Else
    drafts would seem slow for ever on a GPU, and cheap beside penalties."""
    draft_by(monkeypatch, lambda request: [5] * 3)
    engine = with_graphs(make(kv="full", speculative_config=SUFFIX), monkeypatch, Graph)
    monkeypatch.setattr(cuda_graphs, "EAGER_STEPS", 8)
    assert engine.decode_steps.speculation is not None
    taken: list[tuple[int, float]] = []
    monkeypatch.setattr(
        engine.decode_steps.speculation, "took", lambda lengths, rows, seconds: taken.append((rows, seconds))
    )
    engine.add_request("a", prompt(1, 30), PLAIN)
    for _ in range(8 + 1):  # eager steps, and a capture
        engine.step()
    assert not taken
    engine.step()
    assert not taken  # the wait after a step with drafts is known with the next step
    engine.step()
    assert [rows for rows, _ in taken] == [4]
    drain(engine)

    draft_by(monkeypatch, lambda request: [])
    sample = engine.runner.sampler.sample

    def slow(*given: Any) -> Any:
        time.sleep(0.2)
        return sample(*given)

    monkeypatch.setattr(engine.runner.sampler, "sample", slow)
    taken.clear()
    engine.add_request("b", prompt(1, 30), replace(PLAIN, max_tokens=16, repetition_penalty=1.3))
    drain(engine)
    assert min(seconds for _, seconds in taken) < 0.2 <= engine.decode_steps.seconds


def synthetic(rates: Any = None) -> dict[str, Any]:
    drafts = {"method": "mtp", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic"}
    return drafts if rates is None else {**drafts, "synthetic_acceptance_rates": rates}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "method is missing; it is one of ngram, suffix, sparse"),
        ({"method": "eagle"}, "method='eagle' is not one of ngram, suffix, sparse"),
        ({"method": "suffix", "model": "x"}, "'model' is not one of method, num_speculative_tokens"),
        ({(1, 2): 3}, "{(1, 2): 3}: (1, 2) is not one of method, num_speculative_tokens"),
        ({"method": "ngram"}, "needs num_speculative_tokens"),
        ({"method": "suffix", "num_speculative_tokens": 64}, "num_speculative_tokens=64 must be between 1 and 63"),
        (
            {"method": None, "num_speculative_tokens": "8"},
            'method=null must be a string, and is null; num_speculative_tokens="8" must be an integer or null, and is',
        ),
        ({"method": "suffix", "prompt_lookup_min": {"a": True}}, 'prompt_lookup_min={"a": true} must be an integer or'),
        ({"method": "suffix", "prompt_lookup_max": 3}, "has no meaning with method='suffix'"),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 4, "prompt_lookup_max": 2},
            "prompt_lookup_min=4 must be at most prompt_lookup_max, which is 2",
        ),
        ({"method": "mtp", "rejection_sample_method": "block"}, "'block' is not one of standard, synthetic"),
        (synthetic(), "needs synthetic_acceptance_rates: a probability for each of the 2 tokens of a draft"),
        (synthetic([0.8, 0.6]) | {"rejection_sample_method": "standard"}, "[0.8, 0.6] has no meaning with"),
        (synthetic([0.8, -0.1]), "synthetic_acceptance_rates=[0.8, -0.1] must be numbers from 0 to 1"),
        (synthetic([1.1, 0.5]), "synthetic_acceptance_rates=[1.1, 0.5] must be numbers from 0 to 1"),
        (synthetic(["0.8", 0.5]), "synthetic_acceptance_rates=['0.8', 0.5] must be numbers from 0 to 1"),
        (synthetic([0.5, 0.8]), "synthetic_acceptance_rates=[0.5, 0.8] must not increase"),
        (synthetic([0.8]), "has 1 numbers, and must have a probability for each of the 2 tokens"),
        (synthetic(0.8), "synthetic_acceptance_rates=0.8 must be an array or null, and is a number"),
    ],
)
def test_a_wrong_config_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match="speculative_config=") as refused:
        EngineConfig(speculative_config=given)
    assert message in str(refused.value)


def test_the_models_own_drafts_are_refused_for_recurrent_states(tmp_path: Path) -> None:
    build("qwen3_5", tmp_path)
    with pytest.raises(SettingsError, match=r"recurrent state, which .* would change; choose method suffix or ngram"):
        Engine(EngineConfig(model=str(tmp_path), kv="full", max_num_seqs=2, speculative_config={"method": "sparse"}))
    with pytest.raises(SettingsError, match=r"^kv='full-speculative': this model has layers with a recurrent state"):
        Engine(EngineConfig(model=str(tmp_path), kv="full-speculative", max_num_seqs=2))


def test_policies_that_fetch_values_are_refused(make: Any) -> None:
    with pytest.raises(SettingsError, match="set fetch_buffer=0"):
        make(kv="turbo-host", speculative_config=SUFFIX)


def test_drafts_stay_within_the_rows_of_a_step(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs have a most of them."""
    draft_by(monkeypatch, lambda request: [5] * 6)
    engine = make(kv="full", max_num_seqs=3, speculative_config=SUFFIX)
    rows = []
    decode = engine.runner.decode

    def spy(*arguments: Any) -> Any:
        logits = decode(*arguments)
        rows.append(len(logits))
        return logits

    monkeypatch.setattr(engine.runner, "decode", spy)
    for name in ("a", "b", "c"):
        engine.add_request(name, prompt(ord(name), 30), GREEDY)
    drain(engine)
    assert max(rows) == engine.config.max_rows == 10
