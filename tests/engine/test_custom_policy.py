"""The example with policies of one's own, and the bar of ``generate``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import custom_policy

from shadowkv import LLM, SamplingParams


def test_every_policy_answers_and_shows_its_speed(tiny, tmp_path, monkeypatch, capsys):
    config = json.loads((tiny / "config.json").read_text())
    heads = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}  # of 64 dimensions, as codecs need
    (tmp_path / "config.json").write_text(json.dumps({**config, **heads}))
    monkeypatch.setattr(custom_policy, "PROMPT", "ten bytes ")
    custom_policy.main(str(tmp_path), load_format="dummy")
    out, err = capsys.readouterr()
    assert [line.partition(": ")[0] for line in out.splitlines()] == list(custom_policy.policies())
    assert "tokens/s" in err and "1/1" in err


def test_no_bar(tiny, capsys):
    llm = LLM(str(tiny), load_format="dummy", kv="full", max_model_len=64, max_num_seqs=1)
    capsys.readouterr()
    llm.generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)
    assert not capsys.readouterr().err
