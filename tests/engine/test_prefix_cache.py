"""Requests share what was computed of a common start: once for all of them, with the answers of computing it anew."""

from __future__ import annotations

import random
from typing import Any

import pytest
from test_engine import GREEDY, assert_empty, drain, prompt, small_blocks, tokens

from shadowkv import SamplingParams
from shadowkv.engine.engine import Engine
from shadowkv.engine.outputs import TokenOutput
from shadowkv.kvcache.policy.spec import PAGE

DOCUMENT = prompt(1, 10 * PAGE)
POLICIES = [
    "full",
    "turbo:values=dense,min_budget=640",
    "turbo:dense_below=900,values=dense,min_budget=640",
    "turbo-host:values=dense",
    "shadowkv",
    "quest",
]


class Computed:
    """Counts the prompt tokens that an engine computes."""

    def __init__(self, engine: Engine) -> None:
        self.tokens, self._prefill = 0, engine.runner.prefill
        engine.runner.prefill = self

    def __call__(self, work: Any, scored: bool) -> Any:
        self.tokens += sum(len(tokens) for _, tokens in work)
        return self._prefill(work, scored)


def fresh(make: Any, ids: list[int], params: SamplingParams = GREEDY, **options: Any) -> list[int]:
    engine = make(**options)
    engine.add_request("x", ids, params)
    return tokens(drain(engine)["x"])


def until(engine: Engine, count: int) -> dict[str, list[TokenOutput]]:
    """Steps until so many requests run; what came of them."""
    outputs: dict[str, list[TokenOutput]] = {}
    while len(engine.scheduler.running) < count:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def cached(outputs: dict[str, list[TokenOutput]]) -> dict[str, int]:
    return {name: some[-1].cached_tokens for name, some in outputs.items()}


@pytest.mark.parametrize("kv", POLICIES)
def test_questions_about_one_document_compute_it_once(make: Any, kv: str) -> None:
    engine = make(kv=kv, max_num_seqs=5)
    computed = Computed(engine)
    questions = {str(i): DOCUMENT + prompt(10 + i, 100 + i) for i in range(5)}
    for name, ids in questions.items():
        engine.add_request(name, ids, GREEDY)
    outputs = drain(engine)
    assert cached(outputs) == {"0": 0} | dict.fromkeys("1234", len(DOCUMENT))
    assert computed.tokens == len(DOCUMENT) + sum(100 + i for i in range(5))
    if kv == "full":
        assert {name: tokens(some) for name, some in outputs.items()} == {
            name: fresh(make, ids, kv=kv) for name, ids in questions.items()
        }
    assert_empty(engine)


@pytest.mark.parametrize("kv", ["full", "turbo:values=dense,min_budget=640"])
def test_running_sequences_are_shared(make: Any, kv: str) -> None:
    engine = make(kv=kv)
    long = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    engine.add_request("first", DOCUMENT + prompt(2, 100), long)
    begun = until(engine, 1)
    before = engine.cache.free["device"]
    engine.add_request("second", DOCUMENT + prompt(3, 100), GREEDY)
    for name, some in until(engine, 2).items():
        begun.setdefault(name, []).extend(some)
    alone = engine.cache.demand(len(DOCUMENT) + 100, len(DOCUMENT) + 107)["device"]
    assert before - engine.cache.free["device"] < alone, "the document's pages are there twice"
    outputs = drain(engine)
    assert cached(outputs)["second"] == len(DOCUMENT)
    if kv == "full":
        for name, seed, params in (("first", 2, long), ("second", 3, GREEDY)):
            wanted = fresh(make, DOCUMENT + prompt(seed, 100), params, kv=kv)
            assert tokens(begun[name] + outputs[name]) == wanted
    assert_empty(engine)


def test_a_conversation_and_its_branches(make: Any) -> None:
    """Two next turns of one first turn, and one of which the first answer was edited."""
    engine = make(kv="full", max_cached_seqs=8)
    first = prompt(1, 300)
    engine.add_request("first", first, GREEDY)
    answer = tokens(drain(engine)["first"])
    turns = {
        "next": first + answer + prompt(2, 40),
        "again": first + answer + prompt(3, 40),
        "edited": first + prompt(4, 100),
        "early": first[:130] + prompt(5, 100),
    }
    outputs = {}
    for name, ids in turns.items():
        engine.add_request(name, ids, GREEDY)
        outputs |= drain(engine)
    # The first goes on behind the answer's last token, which was never computed; others behind a page.
    assert cached(outputs) == {"next": 307, "again": 256, "edited": 256, "early": 128}
    for name, ids in turns.items():
        assert tokens(outputs[name]) == fresh(make, ids, kv="full")
    assert_empty(engine)


def test_answers_of_one_prompt_share_it(make: Any) -> None:
    engine = make(kv="full")
    computed, ids = Computed(engine), prompt(1, 400)
    for number in range(4):
        engine.add_request(str(number), ids, SamplingParams(max_tokens=5, seed=number, ignore_eos=True))
    outputs = drain(engine)
    assert computed.tokens == 400 + 3 * (400 - 384)
    for number in range(4):
        params = SamplingParams(max_tokens=5, seed=number, ignore_eos=True)
        assert tokens(outputs[str(number)]) == fresh(make, ids, params, kv="full")


def test_few_that_share_little_do_not_wait(make: Any) -> None:
    """One would wait for 600 tokens to be computed, and need not compute 128."""
    engine = make(kv="full", max_num_batched_tokens=2048)
    start = prompt(1, 128)
    for number in range(2):
        engine.add_request(str(number), start + prompt(2 + number, 472), GREEDY)
    until(engine, 2)
    assert len(engine.scheduler.running) == 2
    assert set(cached(drain(engine)).values()) == {0}


def test_a_short_request_does_not_wait_for_a_long_prompt_that_shares_little(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch, 256)
    monkeypatch.setattr("shadowkv.engine.engine.IDLE_PREFILL_SECONDS", 0.0)
    engine = make(kv="full")
    start = prompt(1, PAGE)
    engine.add_request("long", start + prompt(2, 1700), GREEDY)
    engine.step()
    engine.add_request("short", start + prompt(3, 50), GREEDY)
    ends, outputs = [], {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
            ends += [output.request_id] * (output.finish_reason is not None)
    assert ends == ["short", "long"] and cached(outputs) == {"short": 0, "long": 0}


def test_when_who_computes_it_is_cancelled_the_next_does(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, 128)
    monkeypatch.setattr("shadowkv.engine.engine.IDLE_PREFILL_SECONDS", 0.0)
    engine = make(kv="turbo:values=dense,min_budget=640")
    questions = {str(i): DOCUMENT + prompt(10 + i, 130) for i in range(4)}
    for name, ids in questions.items():
        engine.add_request(name, ids, GREEDY)
    for _ in range(3):
        assert not engine.step()
    engine.abort("0")
    outputs = drain(engine)
    assert cached(outputs) == {"1": 0, "2": len(DOCUMENT), "3": len(DOCUMENT)}
    assert_empty(engine)


@pytest.mark.parametrize("options", [{"cache_prompt": False}, {"cache_salt": "mine"}])
def test_what_is_not_to_be_shared_is_not(make: Any, options: dict[str, Any]) -> None:
    engine, found = make(kv="full"), []
    other = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, **options)
    for number, params in enumerate((other, GREEDY, other, GREEDY)):
        engine.add_request("x", DOCUMENT + prompt(number, 5), params)
        found.append(cached(drain(engine))["x"])
    length = len(DOCUMENT)
    assert found == [0, 0, 0 if "cache_prompt" in options else length, length]
    assert_empty(engine)


def test_short_prompts_of_other_salts_share_nothing_either(make: Any) -> None:
    """They have no full page, and are gone on with as they are."""
    engine, ids = make(kv="full"), prompt(1, 20)
    for salt, length, wanted in ((None, 20, 0), ("mine", 40, 0), (None, 40, 20)):
        params = SamplingParams(max_tokens=1, temperature=0.0, cache_salt=salt)
        engine.add_request("x", (ids + prompt(2, 20))[:length], params)
        assert cached(drain(engine))["x"] == wanted


def test_without_the_prefix_cache_nothing_is_kept(make: Any) -> None:
    engine = make(kv="full", enable_prefix_caching=False)
    for _ in range(2):
        engine.add_request("x", DOCUMENT, GREEDY)
        assert cached(drain(engine)) == {"x": 0}
    assert engine.cache.free == engine.cache.total


@pytest.mark.parametrize("kv", ["full", "turbo:values=dense,min_budget=640", "turbo-host:values=dense"])
def test_nothing_leaks_whatever_is_shared_aborted_and_evicted(make: Any, kv: str) -> None:
    """A long random run: chats over two documents, with aborts; a policy that is exact answers as computed anew."""
    engine = make(kv=kv, max_num_seqs=3, max_cached_seqs=3, max_model_len=1600)
    rng, asked, answers = random.Random(kv), dict[str, list[int]](), dict[str, list[int]]()
    documents = [prompt(1, 5 * PAGE), prompt(2, 7 * PAGE + 9)]
    for number in range(40):
        begin = rng.choice([*documents, *(asked[name] + answer for name, answer in answers.items())])
        ids = begin[: rng.choice([len(begin), len(begin), rng.randrange(1, len(begin))])] + prompt(number + 50, 30)
        if len(ids) > 1500:
            continue
        asked[str(number)] = ids
        engine.add_request(str(number), ids, GREEDY)
        for _ in range(rng.randrange(6)):
            for output in engine.step():
                answers.setdefault(output.request_id, []).extend(output.token_ids)
        if rng.random() < 0.2:
            name = str(rng.randrange(number + 1))
            engine.abort(name)
            if len(answers.get(name, ())) < 8:
                answers.pop(name, None)
                asked.pop(name, None)
    for name, outputs in drain(engine).items():
        answers.setdefault(name, []).extend(tokens(outputs))
    if kv == "full":
        for name in rng.sample(sorted(asked), 12):
            if len(answers.get(name, ())) == 8:
                assert answers[name] == fresh(make, asked[name], kv=kv)
    assert_empty(engine)
