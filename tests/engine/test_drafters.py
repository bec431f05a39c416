"""What drafters find in a text, by plain searches, and what the gate lets through."""

from __future__ import annotations

import random
import time

import pytest

from shadowkv.engine.speculation.config import SpeculativeConfig
from shadowkv.engine.speculation.drafters import SEPARATOR, NgramDrafter, RepeatingDrafter, SuffixDrafter, drafter_of
from shadowkv.engine.speculation.gate import AcceptanceRates, Account, Gate, StepTimes


def longest_match(text: list[int]) -> int:
    """Length of the longest suffix of a text that occurs earlier in it."""
    return max(
        (
            length
            for end in range(1, len(text))
            for length in range(1, end + 1)
            if text[end - length : end] == text[-length:]
        ),
        default=0,
    )


@pytest.mark.parametrize("letters", [2, 4, 12])
def test_suffixes_are_the_longest_ones(letters: int) -> None:
    draw = random.Random(letters)
    drafter, text = SuffixDrafter(), list[int]()
    for _ in range(12):
        more = [draw.randrange(letters) for _ in range(draw.choice([1, 1, 1, 4]))]
        if draw.random() < 0.3 and len(text) > 8:
            start = draw.randrange(len(text) - 6)
            more = text[start : start + 6]
        drafter.extend(more)
        text += more
        wanted = longest_match(text)
        assert drafter.matched == (wanted if wanted > 1 else 0)
        if drafter.matched:
            (first, *_), whole = drafter.draft(1), text + drafter.draft(5)
            ends = [end for end in range(2, len(text)) if text[end - wanted : end] == text[-wanted:] and end >= wanted]
            following = [text[end] for end in ends]
            assert following.count(first) == max(map(following.count, following))
            assert len(whole) == len(text) + 5, "a match at the end goes on with its own draft"


def test_ngrams_are_looked_up_from_the_longest_and_the_first() -> None:
    drafter = NgramDrafter(2, 3)
    drafter.extend([1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3])
    assert (drafter.matched, drafter.draft(3)) == (3, [9, 5, 2])
    drafter.extend([7, 2, 3])
    assert (drafter.matched, drafter.draft(2)) == (2, [9, 5])
    drafter.extend([4])
    assert (drafter.matched, drafter.draft(2)) == (0, [])


def test_vllms_defaults() -> None:
    config = SpeculativeConfig.of({"method": "ngram", "num_speculative_tokens": 3})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (5, 5)
    assert SpeculativeConfig.of({"method": "suffix"}).num_speculative_tokens == 24
    config = SpeculativeConfig.of({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2})
    assert isinstance(drafter_of(config), NgramDrafter) and config.prompt_lookup_min == 2


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_end_at_the_end_of_a_predicted_text(method: str) -> None:
    config = {"method": method, "num_speculative_tokens": 8}
    drafter = drafter_of(SpeculativeConfig.of(config | ({"prompt_lookup_max": 2} if method == "ngram" else {})))
    drafter.extend([1, 2, 3, 4, SEPARATOR, 7, 8, 1, 2])
    assert drafter.draft(8) == [3, 4]


def test_the_newest_tokens_are_drafted_where_nothing_matches() -> None:
    drafter = RepeatingDrafter(SuffixDrafter())
    drafter.extend([9, 9, SEPARATOR, 1, 2, 3])
    assert (drafter.matched, drafter.draft(2), drafter.draft(8)) == (1, [2, 3], [1, 2, 3])
    drafter.extend([1, 2])
    assert (drafter.matched, drafter.draft(2)) == (2, [3, 1])


def test_a_long_text_is_read_and_looked_up_in_linear_time() -> None:
    """Texts whose tokens are all alike, and prompts of 100,000 tokens, are no exception."""
    draw = random.Random(0)
    times = []
    for text in ([5] * 20_000, [draw.randrange(50) for _ in range(20_000)]):
        drafter, start = SuffixDrafter(), time.perf_counter()
        drafter.extend(text[:-2000])
        for token in text[-2000:]:
            drafter.extend([token])
            drafter.draft(8)
        times.append(time.perf_counter() - start)
    assert max(times) < 20, times  # a search of the whole text for each token takes minutes


def test_step_times_are_measured_and_interpolated() -> None:
    times = StepTimes()
    assert times.seconds(5) == pytest.approx(1.4)
    for seconds in (2.0, 2.2, 90.0):
        times.add(1, seconds)
    times.add(5, 4.2)
    assert [times.seconds(rows) for rows in (1, 3, 5)] == pytest.approx([2.2, 3.2, 4.2])
    assert times.seconds(7) == pytest.approx(4.2 + 2 * 0.22)
    assert times.seconds(7, together=2) == pytest.approx(4.2 + 0.22), "one more row of each of two sequences"
    assert StepTimes().seconds(30, together=15) == pytest.approx(1.1)


def measured(cost: float) -> StepTimes:
    """Times of steps in which each further row costs this share of a step."""
    times = StepTimes()
    for rows in range(1, 40):
        times.add(rows, 1 + cost * (rows - 1))
    return times


def test_the_gate_drafts_where_it_pays() -> None:
    gate = Gate(AcceptanceRates(None, 16, 1024))
    assert gate.length(20, 8, measured(0.05), 1, 1, 100) == 8
    assert gate.length(20, 8, measured(0.5), 1, 1, 0) < 5
    assert gate.length(20, 8, measured(2.0), 1, 1, 100) == 0
    assert gate.length(20, 8, measured(0.0), 1, 1, 100) == 8
    assert gate.length(2, 8, measured(0.05), 1, 1, 100) < 5, "a short match is less sure"
    assert gate.length(20, 8, measured(0.05), 30, 30, 100) <= 8


def test_a_gate_that_stays_closed_costs_no_look_at_each_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of many requests ask many gates, most of which stay closed: no draft of one request gains much there."""
    gate, times, asked = Gate(AcceptanceRates(None, 16, 1024)), measured(0.05), []
    seconds = times.seconds
    monkeypatch.setattr(times, "seconds", lambda rows: asked.append(rows) or seconds(rows))
    for steps in range(100):
        gate.length(3, 60, times, 100, 100, steps)
    assert len(asked) <= 5 * 100
    assert gate.length(20, 60, times, 1, 1, 100) > 10, "an open one weighs all of them"


@pytest.mark.parametrize("cost", [0.1, 0.3, 0.8])
def test_drafts_that_are_always_wrong_cost_little(cost: float) -> None:
    """At most 2 % of the steps of an answer of 1,000 tokens, and the first few."""
    overall, times, lost = AcceptanceRates(None, 16, 1024), measured(cost), 0.0
    gate = Gate(overall)
    for steps in range(1000):
        if drafted := gate.length(steps % 20, 8, times, 1, 1, steps):
            gate.judge(drafted, 0)
            lost += times.seconds(1 + drafted) - 1
    assert 0 < lost < 20 + 1 + 8 * cost
    gate, again = Gate(overall), 0.0
    for steps in range(100):  # the next request knows
        if drafted := gate.length(2, 8, times, 1, 1, steps):
            gate.judge(drafted, 0)
            again += times.seconds(1 + drafted) - 1
    assert again <= 2


def test_waits_for_drafts_that_are_never_made_cost_little() -> None:
    """At most 2 % of an answer of 200 tokens, and one wait more. The text turns out differently each time."""
    gate, times, lost = Gate(AcceptanceRates(None, 16, 1024)), measured(0.05), 0.0
    for steps in range(200):
        if gate.length(20, 8, times, 1, 1, steps):
            gate.waiting()(0.5)
            lost += 0.5
    assert 1 <= lost <= 0.02 * 200 + 0.5


def test_a_closed_gate_opens_when_the_text_changes() -> None:
    overall, times = AcceptanceRates(None, 16, 1024), measured(0.2)
    gate, opened = Gate(overall), 0
    for steps in range(600):
        right = steps >= 300
        if drafted := gate.length(10, 8, times, 1, 1, steps):
            gate.judge(drafted, drafted if right else 0)
            opened += right and drafted > 2
    assert opened > 100


def test_drafts_of_several_requests_are_weighed_together() -> None:
    """They share the time of a draft step, so what pays for all need not pay for one."""

    def seconds(count: int) -> float:
        return 1 + 0.3 * count

    def length(*drafts: tuple[float, int]) -> int:
        return Account().length(drafts, seconds, 4, 0)

    good, bad = (0.9, 6), (0.1, 6)
    assert length(*[good] * 4) > length(good, good, bad, bad) > 0
    assert length(good) == 0, "a draft of one request costs all four more than it gains"
    assert length(*[bad] * 4) == 0
    assert length(good, *[(0.9, 1)] * 3) == 1, "no other request gains from further tokens"


def test_joint_drafts_that_are_always_wrong_cost_little() -> None:
    account, lost = Account(), 0.0
    for steps in range(0, 4000, 4):
        if drafted := account.length([(0.9, 6)] * 4, lambda count: 1 + 0.2 * count, 4, steps):
            account.spend()
            account.gain(0)
            lost += 4 * 0.2 * drafted
    assert 0 < lost < 0.02 * 4000 + 4 * 0.2 * 6
