"""Drafts of models with recurrent states: answers are those of steps without drafts, whatever is drafted, and states of
wrong tokens are in no checkpoint, snapshot or later step."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import KINDS, PLAIN, SEEDED, SUFFIX, counts, draft_by, mostly, said
from test_decode_memory import failing
from test_engine import assert_empty, drain, prompt, tokens
from test_faults import Graph, with_graphs
from test_layer_kinds import ask
from test_run_ahead import answers, note_steps_ahead
from tiers import assert_nothing_left, evict_device, settle

from shadowkv import LLM, SamplingParams
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.results import RequestOutput
from shadowkv.kvcache.decode.decode_attention import Decode
from shadowkv.kvcache.recurrent import states
from shadowkv.kvcache.recurrent.layout import RING
from shadowkv.layers.gated_delta_net import GatedDeltaNet
from shadowkv.ops.extension import cpu_missing

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from families import build

MANY = {**SUFFIX, "num_speculative_tokens": 40}
SIZES = {"max_position_embeddings": 2048, "head_dim": 16, "vocab_size": 300}

Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            build(family, made[family], SIZES)
        return made[family]

    return of


@pytest.fixture
def hybrid(models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes engines of a small model with random weights, with checkpoints every 128 tokens."""
    monkeypatch.setattr(states, "CHECKPOINT_EVERY", 128)

    def make(family: str = "qwen3_5", backends: dict[str, str] | None = None, **options: Any) -> Engine:
        fields = {"kv": "full", "max_num_seqs": 4, "max_cached_seqs": 4, "kv_dense_below": 0, **options}
        return Engine(EngineConfig(model=str(models(family)), dtype="float32", **fields), backends=backends)

    return make


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_5", {"kv": "full"}),
        ("qwen3_5", {"kv": "turbo:budget=0.5"}),
        ("qwen3_5", {"kv": "full", "mamba_ssm_cache_dtype": "bfloat16"}),
        ("qwen3_next", {"kv": "full"}),
        ("qwen4_exp", {"kv": "full"}),
        ("nemotron_h", {"kv": "full"}),
    ],
    ids=str,
)
def test_answers_are_those_without_drafts(
    hybrid: Make, monkeypatch: pytest.MonkeyPatch, family: str, options: dict[str, Any]
) -> None:
    """Greedy and sampled ones, of ragged batches, whatever else is asked for, beside requests that are aborted."""
    options = {**options, "max_num_seqs": 40}
    wanted, logprobs = said(hybrid(family, **options))
    draft_by(monkeypatch, mostly({name: ids for name, (ids, _) in wanted.items()}))
    engine = hybrid(family, **options, speculative_config=MANY)
    got, got_logprobs = said(engine)
    assert got == wanted and got_logprobs == pytest.approx(logprobs, abs=1e-3)
    accepted, rejected = counts(engine)
    assert accepted > 300 and rejected > 50
    assert engine.cache.use()["recurrent_states"].used_bytes == 0


def test_choices_of_one_prompt_and_stop_strings(models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices begin at the prompt's checkpoint. A text that stops within a draft can be continued."""
    text, letters = [40 + token % 20 for token in prompt(1, 300)], tuple(range(40, 60))
    one = SamplingParams(max_tokens=60, temperature=1.0, ignore_eos=True, seed=3, allowed_token_ids=letters)

    def said(**options: Any) -> tuple[LLM, list[RequestOutput]]:
        llm = LLM(str(models("qwen3_5")), kv="full", max_num_seqs=4, kv_dense_below=0, dtype="float32", **options)
        answers = llm.generate(text, replace(one, n=3))
        (stopped,) = llm.generate(text, replace(one, stop=(answers[0].outputs[0].text[40:44],)))
        return llm, [*answers, stopped, *llm.generate(text + stopped.outputs[0].token_ids + text[:9], one)]

    _, wanted = said()
    (stopped,) = wanted[1].outputs
    assert stopped.finish_reason == "stop" and 10 < len(stopped.token_ids) < 60
    ids = {
        f"{answer.request_id}-{output.index}": output.token_ids for answer in wanted[:1] for output in answer.outputs
    }
    ids |= {answer.request_id: answer.outputs[0].token_ids for answer in wanted[1:]}
    draft_by(monkeypatch, mostly(ids))
    llm, got = said(speculative_config=SUFFIX)
    assert [(one.outputs, one.num_cached_tokens) for one in got] == [(x.outputs, x.num_cached_tokens) for x in wanted]
    assert wanted[2].num_cached_tokens == 300 + len(stopped.token_ids) - 1
    assert min(counts(llm.engine)) > 20
    assert_empty(llm.engine)


def test_rows_that_wait_for_grammars_drop_the_rest_of_their_draft(
    hybrid: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their states wait, too, while others draft."""
    schema = '{"type": "array", "items": {"type": "integer"}}'
    params = replace(SEEDED, max_tokens=60, ignore_eos=False, json_schema=schema)

    def said(engine: Engine) -> dict[str, list[int]]:
        for number, name in enumerate(("a", "b", "c", "aborted", "free")):
            one = replace(SEEDED, max_tokens=60) if name == "free" else replace(params, seed=number)
            engine.add_request(name, prompt(number, 30 + 40 * number), one)
        found: dict[str, list[int]] = {}
        while engine.has_work:
            for output in engine.step():
                found.setdefault(output.request_id, []).extend(output.token_ids)
            if len(found.get("free", ())) > 20:
                engine.abort("aborted")
        del found["aborted"]
        return found

    wanted = said(hybrid(max_num_seqs=5))
    draft_by(monkeypatch, mostly(wanted))
    for seconds in ("RULES_SECONDS", "IDLE_SECONDS"):
        monkeypatch.setattr(f"shadowkv.engine.scheduling.held_rows.{seconds}", 0.0)
    engine = hybrid(max_num_seqs=5, speculative_config=MANY)
    assert said(engine) == wanted
    assert min(counts(engine)) > 5
    assert_empty(engine)
    assert engine.cache.use()["recurrent_states"].used_bytes == 0


@pytest.mark.parametrize("right", [0.5, 1.0])
@pytest.mark.parametrize("length", [100, 300])
def test_later_turns_are_those_of_a_fresh_engine(
    hybrid: Make, monkeypatch: pytest.MonkeyPatch, right: float, length: int
) -> None:
    """On the device, and from the host's copy: no state of a rejected token is in a checkpoint or snapshot."""
    text, params = prompt(1, length), replace(PLAIN, max_tokens=100)
    plain = hybrid()
    plain.add_request("turn", text, params)
    first = tokens(drain(plain)["turn"])
    later = [[*text, *first, *prompt(seed, 30)] for seed in (2, 3)]
    wanted = [ask(hybrid(), one)[0] for one in later]
    draft_by(monkeypatch, mostly({"turn": first}, right))
    engine = hybrid(speculative_config=SUFFIX, kv_offload_gib=0.0625)
    engine.add_request("turn", text, params)
    assert tokens(drain(engine)["turn"]) == first
    assert ask(engine, later[0]) == (wanted[0], length + 99)
    settle(engine)
    evict_device(engine)
    answer, cached = ask(engine, later[1])
    assert answer == wanted[1] and cached >= (length - 1) // 64 * 64
    settle(engine)
    assert_nothing_left(engine)
    assert engine.cache.use()["recurrent_states"].used_bytes == 0
    engine.close()


def test_steps_in_graphs_and_ahead_are_those_without_drafts(hybrid: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph serves steps with drafts and steps of as many sequences without."""
    kinds = [*KINDS[:4], replace(SEEDED, max_tokens=90), replace(PLAIN, temperature=0.7, seed=3, stop_token_ids=(9,))]
    wanted = answers(hybrid(device="cpu"), kinds * 2)
    right, draw = mostly(wanted[0]), random.Random(1)
    draft_by(monkeypatch, lambda request: right(request) if draw.random() < 0.2 else [])
    engine = with_graphs(hybrid(speculative_config=SUFFIX, device="cpu"), monkeypatch, Graph)
    ahead = note_steps_ahead(engine, monkeypatch)
    assert answers(engine, kinds * 2) == wanted
    assert min(counts(engine)) > 20 and min(ahead.count(True), ahead.count(False)) > 20
    assert max(key[0] for key in engine.runner.graphs.graphs) > 4
    assert_empty(engine)


@pytest.mark.parametrize("after", [False, True])
def test_a_step_without_memory_can_be_computed_again(hybrid: Make, after: bool) -> None:
    """It fails in the last layer with a recurrent state, which has not written its states yet, or has."""
    engine = hybrid(backends={"decode_layers": "reference"}, speculative_config=SUFFIX)
    last = [one for layer in engine.runner.layers if (one := layer.linear_attention) is not None][-1]
    assert_computed_again(
        engine, lambda patch: failing(patch, GatedDeltaNet, "_round", lambda self, *_: self is last, after)
    )


@pytest.mark.skipif(bool(cpu_missing()), reason="the C++ extension is not built")
@pytest.mark.parametrize("after", [False, True])
def test_a_fused_step_without_memory_can_be_computed_again(hybrid: Make, after: bool) -> None:
    """It fails beside the second layer with attention. A layer before that has written its recurrent states."""
    engine = hybrid("qwen3_5-more-full", kv="quest:budget=700", speculative_config=SUFFIX)
    assert engine.runner._fused is not None
    assert_computed_again(
        engine, lambda patch: failing(patch, Decode, "_attend_compressed", lambda self, layer, *_: layer == 1, after)
    )


def assert_computed_again(engine: Engine, fail: Callable[[pytest.MonkeyPatch], object]) -> None:
    """Compares logits of steps with drafts with those of steps that ``fail`` interrupts first."""
    cache, runner, text = engine.cache, engine.runner, prompt(1, 200)
    steps = [([5, 6], [[7, 8, 9], [10]], [2, 1]), ([11, 12], [[13], [14, 15]], [2, 1]), ([16, 17], [], [1, 1])]
    found = list[list[torch.Tensor]]()
    for disturbed in (False, True):
        sequences, logits = [cache.allocate(len(text), 400) for _ in range(2)], []
        for _ in runner.prefill([(sequence, text) for sequence in sequences]):
            pass
        for newest, drafts, kept in steps:
            lengths = [sequence.length for sequence in sequences]
            if disturbed:
                with pytest.MonkeyPatch.context() as patch:
                    fail(patch)
                    with pytest.raises(torch.OutOfMemoryError):
                        runner.decode(sequences, newest, None, None, (), drafts)
            assert [sequence.length for sequence in sequences] == lengths
            logits.append(runner.decode(sequences, newest, None, None, (), drafts))
            for sequence, length, count in zip(sequences, lengths, kept, strict=True):
                cache.truncate(sequence, length + count)
        found.append(logits)
        for sequence in sequences:
            cache.release(sequence)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)  # of a wrong state they differ by more than 1
    assert cache.use()["recurrent_states"].used_bytes == 0


def test_states_of_drafted_tokens_are_memory_that_is_counted(hybrid: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each drafted token of a step, and no more tokens are drafted, however many requests there are."""
    plain, engine = hybrid(max_num_seqs=6), hybrid(max_num_seqs=6, speculative_config=SUFFIX)
    layout = engine.cache.layout.recurrent
    assert layout is not None and layout.settings.drafted == 6
    held = engine.cache.recurrent
    assert held.total_bytes == (10 * RING + 10 + 6) * layout.state_bytes
    assert held.total_bytes - plain.cache.recurrent.total_bytes == 6 * layout.state_bytes
    assert sum(array.nbytes for array in held.arrays.values()) == layout.nbytes(10)
    assert engine.cache.layout.fixed_bytes(10) - plain.cache.layout.fixed_bytes(10) == 6 * layout.state_bytes
    (line,) = (line for line in engine.notes if line.startswith("states "))
    assert line.endswith(" for 6 drafted tokens")
    draft_by(monkeypatch, lambda request: [5] * 6)
    rows, plan = [], engine.cache.plan_decode

    def watched(sequences: Any, drafted: Any = None, *others: Any) -> Any:
        rows.append(sum(drafted or [1] * len(sequences)) - len(sequences))
        return plan(sequences, drafted, *others)

    monkeypatch.setattr(engine.cache, "plan_decode", watched)
    for number in range(3):
        engine.add_request(str(number), prompt(number, 70), PLAIN)
    drain(engine)
    assert max(rows) == 6
    sequence = engine.cache.allocate(1, 100)
    with pytest.raises(ValueError, match="7 drafted tokens need a recurrent state each; there is room for 6"):
        plan([sequence], [8])


def test_rows_of_drafted_tokens_come_back(hybrid: Make) -> None:
    """With the next step, also those of a sequence that is not in it. Until then tokens can be removed twice."""
    engine = hybrid(speculative_config=SUFFIX)
    cache, held = engine.cache, engine.cache.recurrent
    first, second = (cache.allocate(1, 100) for _ in range(2))
    before = held.used_bytes
    cache.end_decode(cache.plan_decode([first, second], [4, 2]))
    assert held.used_bytes == before + 4 * held.layout.state_bytes
    cache.end_decode(cache.plan_decode([second], [7]))
    assert held.used_bytes == before + 6 * held.layout.state_bytes
    assert (first.length, second.length) == (4, 9)
    assert first.recurrent.fixed(4) == 3, "the newest token can still be removed"
    cache.truncate(second, 5)
    assert second.recurrent.fixed(5) == 2
    cache.truncate(second, 4)
    with pytest.raises(ValueError, match="cannot cut the sequence to 2 tokens"):
        cache.truncate(first, 2)
    cache.trim(second)
    cache.trim(first)
    assert held.used_bytes == 2 * held.layout.state_bytes
    for sequence in (first, second):
        cache.release(sequence)
    assert held.used_bytes == 0
