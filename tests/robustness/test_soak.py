"""The mixed-load run: all is well with a live server, and what is not the same is noticed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from robustness import soak
from robustness.soak import Answer, Lost, Soak

EXPECTED = Answer(["a", "b"], [-0.1, -0.2], [{"a": -0.1, "x": -0.1015}, {"b": -0.2, "y": -0.3}], "length")


@pytest.mark.slow
@pytest.mark.parametrize("kv", [soak.SERVER["kv"], "turbo:keys=low-rank,values=dense,rank=32,budget=1.0,outliers=4"])
def test_a_live_server(tmp_path, kv):
    out = tmp_path / "soak.json"
    flags = ["--kv", kv, "--requests", "100", "--prompts", "8", "--out", str(out)]
    subprocess.run([sys.executable, "-m", soak.__name__, *flags])
    found = json.loads(out.read_text(encoding="utf-8"))
    # So short a run is over before the server's memory has reached its level.
    assert found["ok"] or not found["memory"]["flat"], found
    assert found["lost"] == found["wrong"] == found["requests left over"] == 0
    assert found["requests"] == sum(found["kinds"].values()) == 100
    # Every whole and streamed answer was compared, but those that found another prompt's tokens cached, and chats'.
    one, asked = found["cached otherwise, not compared"], found["kinds"]["whole"] + found["kinds"]["stream"]
    assert found["same"] + found["near-ties"] >= asked - one > 20
    assert found["KV cache"] == {"sequences at once": soak.SLOTS, "bytes left": 0}
    assert found["hung up before the answer"]
    assert 0 < found["health p50 ms"] <= found["health p99 ms"] <= found["health max ms"]


@pytest.mark.slow
def test_chats_find_their_earlier_turns_where_slots_are_free(tmp_path):
    out = tmp_path / "soak.json"
    # Rounding differs between batches; a basis may then turn, and errors of 8 and 4 bits fall otherwise.
    flags = ["--kv", "turbo:rank=32,budget=1.0,outliers=4", "--tolerance", "0.5"]
    flags += ["--requests", "60", "--prompts", "4", "--concurrency", "2", "--out", str(out)]
    subprocess.run([sys.executable, "-m", soak.__name__, *flags])
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["lost"] == found["wrong"] == found["requests left over"] == 0
    assert found["KV cache"] == {"sequences at once": soak.SLOTS, "bytes left": 0}
    assert found["kinds"]["chat"] and found["chat tokens cached"]


@pytest.mark.parametrize(
    "answer, verdict",
    [
        (EXPECTED, "same"),
        (Answer(["a", "b"], [-0.1, -0.2009], EXPECTED.top, "length"), "same"),
        (Answer(["a", "b"], [-0.1, -0.2011], EXPECTED.top, "length"), "wrong"),
        (Answer(["x", "q"], [-0.1, -0.5], EXPECTED.top, "stop"), "near-ties"),
        (Answer(["a", "y"], [-0.1, -0.3], EXPECTED.top, "length"), "wrong"),
        (Answer(["a", "q"], [-0.1, -0.2], EXPECTED.top, "length"), "wrong"),
        (Answer(["a"], [-0.1], EXPECTED.top[:1], "length"), "wrong"),
    ],
)
def test_answers_are_compared(answer, verdict):
    run = Soak(None, soak.parse([]))
    run.compare(EXPECTED, answer)
    assert [*run.counts] == [verdict] and bool(run.faults) == (verdict == "wrong")


def test_half_an_answer_is_a_lost_one():
    with pytest.raises(Lost):
        Soak(None, soak.parse([])).compare(EXPECTED, Answer(["a", "b"], [-0.1, -0.2], EXPECTED.top, None))
