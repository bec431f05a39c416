"""Answers with drafts are compared with those without, and one that differs without a near tie is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.serving import drafted_answers
from benchmarks.sweeps.rows import read
from robustness.tiny_model import tiny_model
from shadowkv.engine.outputs import TokenLogprobs

LOGPROBS = TokenLogprobs(3, -0.1, {3: -0.1, 7: -2.5, 9: -4.0})


def test_samples_are_asked_once_and_other_answers_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, answer = tmp_path / "answers.csv", drafted_answers.answer
    asked = list[str]()

    def spied(engine: Any, sequence: Any, first: int, prompt: list[int], params: Any) -> Any:
        tokens, places = answer(engine, sequence, first, prompt, params)
        drafts = engine.decode_steps.speculation is not None
        asked.append("with drafts" if drafts else "without")
        if drafts and len(asked) > 2:  # in the second sample
            tokens[5] = (tokens[5] + 1) % 128
        return tokens, places

    monkeypatch.setattr(drafted_answers, "answer", spied)
    with tiny_model() as model:
        flags = ["--model", str(model), "--load-format", "dummy", "--device", "cpu", "--length", "2000"]
        flags += ["--tasks", "niah_multikey_3", "--out", str(out)]
        assert drafted_answers.main(flags) == 0
        (row,) = read(out)
        assert int(row["drafted"]) >= int(row["accepted"]) > 0 and int(row["tokens"]) == 128
        assert 0 < float(row["error"]) < 1e-3
        assert drafted_answers.main([*flags, "--samples", "2"]) == 1
    assert asked == ["without", "with drafts"] * 2
    same, other = read(out)
    assert same == row and (other["sample"], other["equal"]) == ("0-1", "5")
    assert float(other["gap"]) > float(other["error"])
    assert "niah_multikey_3 0-1: no near tie after 5 tokens" in capsys.readouterr().err


def test_a_near_tie_is_within_the_rounding_of_full_attention() -> None:
    again = [-9.0] * 10
    again[3], again[7], again[9] = -0.2, -2.3, -4.4
    gap, error = drafted_answers.gaps(LOGPROBS, torch.tensor(again))
    assert (gap, error) == (pytest.approx(2.4), pytest.approx(0.3))
    row = {"gap": "2.4", "error": "0.3"}
    assert drafted_answers.is_wrong(row)
    assert not drafted_answers.is_wrong({**row, "gap": "0.2"}) and not drafted_answers.is_wrong({**row, "gap": ""})


@pytest.mark.parametrize("kv", ["turbo", "full-speculative"])
def test_the_verifier_attends_to_every_token(kv: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        drafted_answers.main(["--kv", kv, "--out", str(tmp_path / "answers.csv")])
    assert f"--kv {kv}: the policy must attend to every token, without drafts" in capsys.readouterr().err
