"""Steps that are launched before the last one's tokens are known give the same answers."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from tiers import assert_all_returned

from shadowkv import SamplingParams
from shadowkv.engine.engine import Engine

PLAIN = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
KINDS = [
    PLAIN,
    replace(PLAIN, temperature=1.0, seed=7, stop_token_ids=list(range(3, 40))),
    replace(PLAIN, max_tokens=1),
    replace(PLAIN, repetition_penalty=1.3),
    replace(PLAIN, temperature=0.8, seed=8, ignore_eos=False),
    replace(PLAIN, logprobs=2, max_tokens=5),
]


def answers(engine: Engine, params: list[SamplingParams]) -> tuple[dict[str, list[int]], dict[str, str | None]]:
    """Tokens and ends of requests that come one by one; every fifth is aborted on the way and left out."""
    draw, waiting, step = random.Random(3), list(enumerate(params)), 0
    tokens: dict[str, list[int]] = {}
    ends: dict[str, str | None] = {}
    while waiting or engine.has_work:
        if waiting and step % 3 == 0:
            number, one = waiting.pop(0)
            prompt = [draw.randrange(3, 256) for _ in range(draw.choice([5, 70, 450]))]
            engine.add_request(str(number), prompt, one)
        if step % 15 == 14:
            engine.abort(str(step // 15 * 5))
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            ends[output.request_id] = output.finish_reason
        step += 1
    for number in range(0, len(params), 5):
        tokens.pop(str(number), None)
        ends.pop(str(number), None)
    return tokens, ends


def note_steps_ahead(engine: Engine, patch: pytest.MonkeyPatch) -> list[bool]:
    """For each step from now on, whether it is launched before the tokens of the step before it are read."""
    ahead, decode = list[bool](), engine.runner.decode

    def noted(sequences: Any, last: Any, sources: list[int], *others: Any) -> Any:
        ahead.append(max(sources) >= 0)
        return decode(sequences, last, sources, *others)

    patch.setattr(engine.runner, "decode", noted)
    return ahead


@pytest.mark.parametrize("kv", ["full", "shadowkv", "quest"])
def test_answers_are_those_of_steps_one_by_one(make: Any, monkeypatch: pytest.MonkeyPatch, kv: str) -> None:
    params = KINDS * 3
    wanted, ahead = (
        make(kv=kv if kv == "full" else f"{kv}:budget=0.5"),
        make(kv=kv if kv == "full" else f"{kv}:budget=0.5"),
    )
    ahead.decode_steps.run_ahead = True
    launched = note_steps_ahead(ahead, monkeypatch)
    assert answers(ahead, params) == answers(wanted, params)
    assert any(launched)
    for engine in (ahead, wanted):
        assert_all_returned(engine)


def test_a_finished_sequence_keeps_only_what_was_said(make: Any) -> None:
    engine = make(kv="full")
    engine.decode_steps.run_ahead = True
    draw = random.Random(1)
    prompt = [draw.randrange(3, 256) for _ in range(100)]
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=6, stop_token_ids=list(range(3, 30)), ignore_eos=True)
    engine.add_request("a", prompt, params)
    said: list[int] = []
    while engine.has_work:
        for output in engine.step():
            said += output.token_ids
    assert 1 < len(said) < 30, "the seed must end the answer by a stop token"
    lengths = engine.cache.groups[0].pool.tables.length
    assert lengths.max() == len(prompt) + len(said) - 1  # the last token's keys were never computed
