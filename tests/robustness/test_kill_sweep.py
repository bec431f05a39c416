"""Servers that are killed and started again: all is well with them, and what would not be is noticed."""

from __future__ import annotations

import json

import pytest

from robustness import kill_sweep
from robustness.kill_sweep import Held, Sweep
from robustness.live_server import Answer
from robustness.tiny_model import tiny_model
from shadowkv.prefix_cache.page_hashes import PageHashes

EXPECTED = Answer(["a"], [-0.1], [{"a": -0.1, "b": -3.0}], "length")
ORIGIN = 40 * "0"


@pytest.mark.slow
def test_a_server_that_is_killed_and_the_next(tmp_path):
    out = tmp_path / "kills.json"
    sizes = ["--documents", "2", "--questions", "2", "--words", "100", "120", "--seconds", "1", "--kills", "1"]
    with tiny_model() as model:
        flags = ["--model", str(model), "--load-format", "dummy", "--kv", "full", *sizes, "--out", str(out)]
        kill_sweep.main(flags)  # so short a load may leave nothing
    (found,) = json.loads(out.read_text(encoding="utf-8"))["runs"]
    assert (found["kills"], found["starts"], found["faults"]) == (1, 3, [])
    assert found["same"] + found["near-ties"] == found["answered"] >= 4
    assert found["files"] and not found["bad files"] and not found["files gone"]


@pytest.mark.parametrize(
    "answer, cached, counted",
    [
        (EXPECTED, 128, {"same": 1}),
        (EXPECTED, 64, {"same": 1, "computed again": 64}),
        (Answer(["b"], [-0.1], [{"b": -0.1}], "length"), 128, {"wrong": 1}),
    ],
)
def test_answers_and_what_is_computed_again_are_judged(answer, cached, counted):
    sweep = Sweep(kill_sweep.parse([]), "full")
    sweep.prompts[0, 1], sweep.known[(0, 1), 0] = list(range(200)), EXPECTED
    sweep.judge((0, 1), cached, answer, 128)
    assert {name: sweep.counts[name] for name in ("same", "wrong", "computed again") if sweep.counts[name]} == counted
    assert bool(sweep.faults) == (counted != {"same": 1})


def test_what_files_hold_of_a_prompt():
    prompt = list(range(256))
    pages = PageHashes(ORIGIN).extend_to(prompt)
    held = Held(ORIGIN, frozenset(pages), frozenset(), frozenset(), (0, 0))
    assert held.tokens(prompt) == 192  # the last token is computed
    assert held.tokens([*prompt, 1]) == 256
    assert held.tokens([*prompt[:100], 0, *prompt[101:]]) == 64
