"""Scheduling, admission, aborts and faults, on a tiny model with random weights."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tiers import assert_all_returned

from shadowkv import SamplingParams
from shadowkv.engine.engine import PREFILL_PER_DECODE, Engine
from shadowkv.engine.execution.forward import BLOCK_TOKENS
from shadowkv.engine.outputs import TokenOutput
from shadowkv.engine.request import RequestError
from shadowkv.kvcache.memory.arenas import Blocks

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 256) for _ in range(length)]


def small_blocks(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Prefills can be paused after so many tokens, and are wherever they can while others decode: no step has any."""
    for kind in BLOCK_TOKENS:
        monkeypatch.setitem(BLOCK_TOKENS, kind, tokens)
        monkeypatch.setitem(PREFILL_PER_DECODE, kind, 0.0)
    for gap in ("TOKEN_GAP", "QUEUED_TOKEN_GAP", "PACKED_TOKEN_GAP"):
        monkeypatch.setattr(f"shadowkv.engine.engine.{gap}", 0.0)


def drain(engine: Engine) -> dict[str, list[TokenOutput]]:
    outputs: dict[str, list[TokenOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def assert_empty(engine: Engine) -> None:
    """Nothing is left of any request."""
    assert not engine.has_work and not engine._open and not engine._aborted
    assert_all_returned(engine)
    assert engine.cache.free["sequences"] == engine.config.max_num_seqs + engine.config.max_cached_seqs


def leave_blocks(engine: Engine, device: int, host: int) -> None:
    """Shrinks the tiers, as on a machine with less memory."""
    for name, count in (("device", device), ("host", host)):
        tier = engine.cache.groups[0].store.tiers[name]
        count = min(count, tier.num_blocks)
        tier.allocate(tier.num_blocks - count)
        tier.num_blocks = count


@pytest.mark.parametrize("kv", ["full", "shadowkv", "quest"])
def test_admission_never_exceeds_either_budget_and_keeps_the_order(make: Any, kv: str) -> None:
    engine = make(kv=kv, max_num_seqs=6)
    cache = engine.cache
    leave_blocks(engine, 60, 40)
    rng, started = random.Random(5), []
    for number in range(25):
        length = rng.choice([1, 5, 64, 200, 900])
        engine.add_request(str(number), prompt(number, length), GREEDY)
    most = 0
    admit = engine.scheduler.admit

    def checked(*args: Any, **limits: Any) -> list[Any]:
        nonlocal most
        new = admit(*args, **limits)
        owners = engine.scheduler.running + new
        need = Blocks()
        for owner in owners:
            need += cache.demand(len(owner.request.prompt_token_ids), owner.request.capacity)
        assert need.within(cache.total)
        assert len(owners) <= 6
        if engine.scheduler.waiting and len(owners) < 6:
            head = engine.scheduler.waiting[0]
            assert not cache.demand(len(head.prompt_token_ids), head.capacity).within(cache.total - need)
        most = max(most, len(owners))
        return new

    engine.scheduler.admit = checked
    while engine.has_work:
        for output in engine.step():
            if output.request_id not in started:
                started.append(output.request_id)
    assert started == sorted(started, key=int)
    assert most > 1
    assert_empty(engine)


def test_answers_do_not_depend_on_who_else_runs(make: Any) -> None:
    lengths = [1, 30, 64, 130, 700, 900, 1000]
    crowd = make(kv="shadowkv", max_num_seqs=3)
    for number, length in enumerate(lengths):
        crowd.add_request(str(number), prompt(number, length), GREEDY)
    together = drain(crowd)
    for number, length in enumerate(lengths):
        alone = make(kv="shadowkv", max_num_seqs=1)
        alone.add_request("x", prompt(number, length), GREEDY)
        assert tokens(drain(alone)["x"]) == tokens(together[str(number)])


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(make: Any) -> None:
    engine = make(kv="shadowkv", max_model_len=1000)
    with pytest.raises(RequestError, match=r"1000 tokens.*990 tokens.*20 more") as caught:
        engine.requests.limits.check(prompt(0, 990), SamplingParams(max_tokens=20))
    assert caught.value.param == "max_tokens"
    with pytest.raises(RequestError, match="1500 tokens") as caught:
        engine.requests.limits.check(prompt(0, 1500), SamplingParams(max_tokens=None))
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match="empty"):
        engine.requests.limits.check([], GREEDY)
    with pytest.raises(RequestError, match="token id 300"):
        engine.requests.limits.check([5, 300], GREEDY)
    leave_blocks(engine, 3, 3)
    with pytest.raises(RequestError, match="blocks"):
        engine.request("large", prompt(0, 900), GREEDY)


def test_without_max_tokens_a_default_is_reserved_not_the_context(make: Any) -> None:
    engine = make(kv="full", default_max_tokens=32)
    assert engine.requests.limits.max_tokens(100, SamplingParams(max_tokens=None)) == 32
    assert engine.requests.limits.max_tokens(2040, SamplingParams(max_tokens=None)) == 8


def test_contexts_that_never_compress_start(make: Any) -> None:
    engine = make(kv="shadowkv", max_model_len=512)
    engine.add_request("a", prompt(0, 500), GREEDY)
    assert len(tokens(drain(engine)["a"])) == 8


def test_too_little_memory_for_one_sequence_names_both_amounts(make: Any) -> None:
    with pytest.raises(MemoryError, match=r"tokens needs 0\.9\d MiB of device and 0\.\d+ MiB of host .* available"):
        make(kv="shadowkv", max_model_len=2048, host_memory_gib=0.0)


def test_more_host_memory_than_is_free_is_refused(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"kv": "shadowkv:budget=256", "max_num_seqs": 30, "gpu_memory_utilization": 1.0, "host_memory_gib": 1.0}
    taken = make(**settings).stats().tiers["host"].total_bytes
    monkeypatch.setattr("shadowkv.engine.startup.sizing.free_host_bytes", lambda: taken)
    make(**settings)
    monkeypatch.setattr("shadowkv.engine.startup.sizing.free_host_bytes", lambda: taken - 1)
    with pytest.raises(MemoryError, match=r"take \d+\.\d+ MiB of host memory, \d+\.\d+ MiB is free\. Lower host"):
        make(**settings)


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding"])
def test_an_aborted_request_leaves_nothing_behind(make: Any, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(kv="shadowkv", max_num_seqs=1 if when == "waiting" else 4)
    small_blocks(monkeypatch, 100)
    engine.add_request("first", prompt(1, 10), SamplingParams(max_tokens=60, ignore_eos=True))
    while not engine.scheduler.running:
        engine.step()
    engine.add_request("victim", prompt(2, 1500), SamplingParams(max_tokens=60, ignore_eos=True))
    seen = engine.step()
    if when == "prefilling":
        assert [r.request.request_id for r in engine.prefill_queue.in_flight[0].rows] == ["victim"]
    while when == "decoding" and not any(output.request_id == "victim" for output in seen):
        seen = engine.step()
    engine.abort("victim")
    engine.abort("victim")
    outputs = drain(engine)
    assert "victim" not in outputs
    assert outputs["first"][-1].finish_reason == "length"
    assert_empty(engine)


def test_an_abort_among_prompts_prefilled_together(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(kv="full")
    small_blocks(monkeypatch, 50)
    for name, seed in (("a", 1), ("b", 2), ("c", 3)):
        engine.add_request(name, prompt(seed, 40), GREEDY)
    engine.prefill_queue.start()
    next(engine.prefill_queue.in_flight[0].steps)
    engine.abort("b")
    outputs = drain(engine)
    assert set(outputs) == {"a", "c"}
    assert_empty(engine)


def test_decodes_go_on_while_a_long_prompt_is_prefilled(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(kv="shadowkv")
    small_blocks(monkeypatch, 50)
    engine.add_request("short", prompt(1, 10), SamplingParams(max_tokens=2000, ignore_eos=True))
    engine.step()
    engine.add_request("long", prompt(2, 1500), GREEDY)
    during = 0
    while True:
        outputs = engine.step()
        if any(output.request_id == "long" for output in outputs):
            break
        during += len(outputs)
    assert during >= 30  # 2 layers of 30 blocks
    engine.abort("short")
    drain(engine)
    assert_empty(engine)


def test_nan_logits_fail_their_request_alone(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = make(kv="full")
    healthy.add_request("b", prompt(2, 20), GREEDY)
    wanted = tokens(drain(healthy)["b"])
    engine = make(kv="full")
    decode = engine.runner.decode

    def poisoned(sequences: list[Any], last: list[int], sources: list[int], *rest: Any) -> torch.Tensor:
        logits = decode(sequences, last, sources, *rest).clone()
        if len(sequences) == 2:
            logits[0] = float("nan")
        return logits

    monkeypatch.setattr(engine.runner, "decode", torch.inference_mode()(poisoned))
    engine.add_request("a", prompt(1, 20), GREEDY)
    engine.add_request("b", prompt(2, 20), GREEDY)
    outputs = drain(engine)
    assert outputs["a"][-1].finish_reason == "error"
    assert "not finite" in outputs["a"][-1].error
    assert tokens(outputs["b"]) == wanted
    assert_empty(engine)


def test_finished_sequences_give_way_oldest_first(make: Any) -> None:
    engine = make(kv="full", max_num_seqs=1, max_cached_seqs=1)
    for name, seed in (("a", 1), ("b", 2)):
        engine.add_request(name, prompt(seed, 100), GREEDY)
    first = drain(engine)
    assert len(engine.scheduler.prefix_cache) == 2
    engine.add_request("c", prompt(3, 100), GREEDY)  # takes the slot of a
    drain(engine)
    turns = {name: prompt(seed, 100) + tokens(first[name]) + [7, 8] for name, seed in (("a", 1), ("b", 2))}
    engine.add_request("b2", turns["b"], GREEDY)
    assert drain(engine)["b2"][-1].cached_tokens == 107
    engine.add_request("a2", turns["a"], GREEDY)
    assert drain(engine)["a2"][-1].cached_tokens == 0


def test_a_common_start_does_not_use_up_a_long_conversation(make: Any) -> None:
    engine = make(kv="full")
    engine.add_request("long", prompt(1, 500), GREEDY)
    drain(engine)
    engine.add_request("other", prompt(1, 20) + prompt(9, 50), GREEDY)
    assert drain(engine)["other"][-1].cached_tokens == 0


def test_stop_token_ends_without_text_and_with_reason_stop(make: Any) -> None:
    engine = make(kv="full")
    engine.add_request("a", prompt(4, 30), GREEDY)
    answer = drain(engine)["a"]
    stop = tokens(answer)[3]
    engine.add_request("b", prompt(4, 30), SamplingParams(max_tokens=8, temperature=0.0, stop_token_ids=(stop,)))
    ended = drain(engine)["b"]
    assert ended[-1].finish_reason == "stop"
    assert tokens(ended) == tokens(answer)[: tokens(answer).index(stop) + 1]


def test_repetition_penalty_works_in_decode(make: Any) -> None:
    engine = make(kv="full")
    params = SamplingParams(max_tokens=30, temperature=0.0, repetition_penalty=100.0, ignore_eos=True)
    engine.add_request("a", prompt(1, 20), params)
    answer = tokens(drain(engine)["a"])
    assert len(set(answer)) == 30


def test_seeded_sampling_is_the_same_in_any_company(make: Any) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=11, ignore_eos=True)
    alone, crowd = make(kv="shadowkv"), make(kv="shadowkv")
    alone.add_request("x", prompt(1, 50), params)
    for number in range(5):
        crowd.add_request(str(number), prompt(number, 10 + number), SamplingParams(max_tokens=9, ignore_eos=True))
    crowd.add_request("x", prompt(1, 50), params)
    assert tokens(drain(alone)["x"]) == tokens(drain(crowd)["x"])


def test_prompt_logprobs_are_those_of_generating_the_prompt(make: Any) -> None:
    engine = make(kv="full")
    wanted = prompt(3, 700)
    params = SamplingParams(max_tokens=0, prompt_logprobs=2)
    engine.add_request("score", wanted, params)
    (scored,) = drain(engine)["score"]
    assert (scored.finish_reason, scored.token_ids, len(scored.prompt_logprobs)) == ("length", [], 700)
    assert scored.prompt_logprobs[0] is None
    for place in (1, 513, 699):
        # The token at this place, forced by a bias, reports its own log-probability before the bias.
        forced = SamplingParams(max_tokens=1, temperature=0.0, logprobs=2, logit_bias={wanted[place]: 100.0})
        engine.add_request("next", wanted[:place], forced)
        (found,) = drain(engine)["next"][0].logprobs
        assert found.token_id == scored.prompt_logprobs[place].token_id == wanted[place]
        assert found.logprob == pytest.approx(scored.prompt_logprobs[place].logprob, abs=1e-4)
        assert found.top == pytest.approx(scored.prompt_logprobs[place].top, abs=1e-4)
    assert_empty(engine)


def test_min_tokens_keep_end_tokens_away(make: Any) -> None:
    engine = make(kv="full")
    ends = {"stop_token_ids": (5,), "logit_bias": {5: 100.0}, "temperature": 0.0, "max_tokens": 9}
    engine.add_request("a", prompt(1, 20), SamplingParams(**ends))
    engine.add_request("b", prompt(1, 20), SamplingParams(**ends, min_tokens=4))
    outputs = drain(engine)
    assert tokens(outputs["a"]) == [5]
    answer = tokens(outputs["b"])
    assert len(answer) == 5
    assert answer.index(5) == 4


def test_times_and_stats(make: Any) -> None:
    engine = make(kv="shadowkv")
    engine.add_request("a", prompt(1, 900), GREEDY)
    before = engine.stats()
    assert (before.running, before.waiting) == (0, 1)
    assert not any(tier.used_bytes for tier in before.tiers.values())
    engine.step()
    during = engine.stats()
    assert (during.running, during.waiting) == (1, 0)
    assert set(during.tiers) == {"device", "host", "states"}
    assert all(0 < tier.used_bytes <= tier.total_bytes for tier in during.tiers.values())
    times = drain(engine)["a"][-1].times
    assert times.arrival <= times.scheduled <= times.first_token < times.last_token


def test_stop_tokens_outside_the_vocabulary_are_refused(make: Any) -> None:
    engine = make(kv="full")
    with pytest.raises(RequestError, match="token id 300") as caught:
        engine.requests.limits.check([5], SamplingParams(min_tokens=1, max_tokens=8, stop_token_ids=(300,)))
    assert caught.value.param == "stop_token_ids"


def test_an_aborted_id_in_prefill_cannot_be_taken_again_at_once(make: Any) -> None:
    engine = make(kv="full")
    for name, seed in (("a", 1), ("b", 2)):
        engine.add_request(name, prompt(seed, 40), GREEDY)
    engine.prefill_queue.start()
    next(engine.prefill_queue.in_flight[0].steps)
    engine.abort("b")
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("b", prompt(3, 40), GREEDY)
    assert set(drain(engine)) == {"a"}
    assert_empty(engine)


def test_overflowing_keys_fail_their_request_alone(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(kv="shadowkv")
    embed = engine.runner.model.embed
    monkeypatch.setattr(
        engine.runner.model, "embed", lambda ids: embed(ids).masked_fill((ids == 200)[:, None], float("inf"))
    )
    long = [token if token != 200 else 201 for token in prompt(1, 900)]
    engine.add_request("bad", long[:450] + [200] + long[450:], GREEDY)
    engine.add_request("good", long, GREEDY)
    outputs = drain(engine)
    assert outputs["bad"][-1].finish_reason == "error"
    assert len(tokens(outputs["good"])) == 8
    assert_empty(engine)


def test_a_waiting_turn_keeps_its_conversation(make: Any) -> None:
    engine = make(kv="full", max_num_seqs=2)
    leave_blocks(engine, 20, 0)
    engine.add_request("turn 1", prompt(1, 500), GREEDY)
    first = tokens(drain(engine)["turn 1"])
    engine.add_request("other", prompt(2, 500), SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))
    engine.step()
    engine.add_request("turn 2", prompt(1, 500) + first + prompt(3, 300), GREEDY)
    assert drain(engine)["turn 2"][-1].cached_tokens == 507
    assert_empty(engine)


@pytest.mark.parametrize("kv", ["full", "shadowkv"])
def test_a_request_goes_on_from_a_prompt_computed_elsewhere(make: Any, kv: str) -> None:
    engine, ids = make(kv=kv), prompt(3, 700)
    engine.add_request("whole", ids, GREEDY)
    wanted = tokens(drain(engine)["whole"])
    engine.scheduler.prefix_cache.evict()
    request = engine.request("resumed", ids, GREEDY)
    too_small = engine.cache.allocate(700, 701)
    with pytest.raises(ValueError, match="the sequence has 0 tokens and room for 701; the request needs 700 tokens"):
        engine.resume(request, too_small, wanted[0])
    engine.cache.release(too_small)
    sequence = engine.cache.allocate(700, request.capacity)
    with torch.inference_mode():
        for _ in engine.runner.prefill([(sequence, ids)]):
            pass
    first = engine.resume(request, sequence, wanted[0])
    assert (first.token_ids, first.cached_tokens) == (wanted[:1], 700)
    with pytest.raises(RequestError, match="in use"):
        engine.resume(request, sequence, wanted[0])
    assert wanted[:1] + tokens(drain(engine)["resumed"]) == wanted
    assert_empty(engine)
