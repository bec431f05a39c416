"""The example with a policy of one's own, and the bar of ``generate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import custom_policy
import pytest
import torch

from shadowkv import LLM, SamplingParams
from shadowkv.kvcache import parts
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.presets import preset

pytestmark = pytest.mark.usefixtures("registries_are_put_back")


def test_every_policy_answers_and_shows_its_speed(tiny: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    config = json.loads((tiny / "config.json").read_text())
    heads = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}  # of 64 dimensions, as codecs need
    (tmp_path / "config.json").write_text(json.dumps({**config, **heads}))
    monkeypatch.setattr(custom_policy, "PROMPT", "ten bytes ")
    custom_policy.main(str(tmp_path), load_format="dummy")
    out, err = capsys.readouterr()
    names = [line.partition(": ")[0] for line in out.splitlines()]
    assert names == ["turbo", "rounded", "rounded:bits=1", "quest:values=rounded,bits=2"]
    assert "tokens/s" in err and "1/1" in err


def test_values_have_as_many_bits_as_its_setting_says(tiny: Path) -> None:
    custom_policy.register()
    kv = "rounded:bits=3,rank=16,index=none"
    with LLM(str(tiny), load_format="dummy", kv=kv, kv_dense_below=0, max_model_len=512, max_num_seqs=1) as llm:
        llm.generate([[5 + i % 200 for i in range(400)]], SamplingParams(max_tokens=2))
        group = llm.engine.cache.groups[0]
        values = group.store.page["values"][0][group.pool.tables.pages[0, :4].long()]
    mantissa = values.float().frexp()[0] * 8
    assert values.abs().max() > 0 and torch.equal(mantissa, mantissa.round())


def test_its_setting_is_checked() -> None:
    custom_policy.register()
    shape = ModelShape(num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=16)
    with pytest.raises(ValueError, match="bits=0 must be at least 1"):
        parts.resolve(preset("rounded:bits=0"), shape)
    with pytest.raises(
        ValueError, match=r"bits=2 has no meaning with values='rotated-4bit'; values that have it: rounded"
    ):
        parts.resolve(preset("turbo:bits=2"), shape)


def test_no_bar(tiny: Path, capsys: Any) -> None:
    llm = LLM(str(tiny), load_format="dummy", kv="full", max_model_len=64, max_num_seqs=1)
    capsys.readouterr()
    llm.generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)
    assert not capsys.readouterr().err
