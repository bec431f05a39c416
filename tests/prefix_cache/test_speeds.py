"""Estimated times of restoring and computing."""

import pytest

from shadowkv.prefix_cache.chains import LONG, Speeds


def test_short_prompts_correct_the_guess_until_there_is_a_long_one() -> None:
    speeds = Speeds()
    guess = speeds.computing_seconds(1000)
    speeds.computed(400, 4.0)
    assert speeds.computing_seconds(1000) == pytest.approx(10) != guess
    speeds.computed(100, 0.5)
    assert speeds.computing_seconds(1000) == pytest.approx(5)
    speeds.computed(2 * LONG, 2 * LONG * 1e-4)
    speeds.computed(100, 5.0)
    speeds.computed(0, 5.0)
    assert speeds.computing_seconds(1000) == pytest.approx(0.1)


def test_what_is_left_of_a_cached_prompt_tells_nothing() -> None:
    speeds = Speeds()
    speeds.computed(900, 0.07)
    speeds.computed(1, 0.004)
    assert speeds.computing_seconds(900) == pytest.approx(0.07)


def test_the_last_measurements_count_most() -> None:
    speeds = Speeds()
    for seconds in (1.0, 1.0, 2.0):
        speeds.host.add(1000, seconds)
    assert 1.2 < speeds.host.seconds(1000) < 1.5
    speeds.forget()
    assert speeds.host.seconds(1000) == Speeds().host.seconds(1000)
