"""The fidelity command: full attention equals itself, and the figures of a policy come with its spec."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shadowkv.eval import fidelity


def test_compare_follows_the_formula() -> None:
    reference, logits = torch.randn(5, 11), torch.randn(5, 11)
    p, q = reference.softmax(-1), logits.softmax(-1)
    kl = (p * (p / q).log()).sum(-1)
    found = fidelity.compare(reference, logits)
    assert (found.mean_kl, found.max_kl) == pytest.approx((kl.mean().item(), kl.max().item()), rel=1e-4)
    assert found.top1_agreement == pytest.approx((p.argmax(-1) == q.argmax(-1)).float().mean().item())
    assert fidelity.compare(logits, logits).mean_kl == pytest.approx(0, abs=1e-6)


def test_command_reports_every_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    words = Path(fidelity.__file__).read_text()  # any text with some variety
    text.write_text(words)
    arguments = ["--text", str(text), "--prompt-tokens", "800", "--new-tokens", "3", "--kv", "full", "shadowkv"]
    assert fidelity.main(arguments) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [row["kv"] for row in rows] == ["full", "shadowkv"]
    assert rows[0]["mean_kl"] == pytest.approx(0, abs=1e-6)
    assert rows[0]["attended_tokens"] == 802
    assert rows[1]["attended_tokens"] < 802
    assert 0.8 < rows[1]["least_kept_energy"] < 1
    assert rows[1]["spec"]["rank"] == 96


def test_too_short_a_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Too short.")
    assert fidelity.main(["--text", str(text)]) == 2
    assert "has 3 tokens, --prompt-tokens asks for 2048" in capsys.readouterr().err
    assert fidelity.main(["--text", str(tmp_path / "absent.txt")]) == 2
