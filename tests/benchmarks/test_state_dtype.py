"""What states in bfloat16 cost: nothing for the first token, which reads no state, and something afterwards."""

from __future__ import annotations

import pytest

from benchmarks.prefix_cache import state_dtype


def test_states_are_rounded_after_each_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert state_dtype.main(["--tokens", "40", "--ranges", "2"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "tokens 0 to 20",
        "tokens 20 to 40",
    ]
    divergences = state_dtype.measure(12)
    assert divergences[0] == 0 and divergences[1:].min() > 0
