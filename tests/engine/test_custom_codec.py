"""The example with a codec of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import custom_codec
import pytest
import torch

from shadowkv.kvcache import codecs

pytestmark = pytest.mark.usefixtures("registries_are_put_back")


def test_every_policy_answers(tiny: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    config = json.loads((tiny / "config.json").read_text())
    heads = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}  # of 64 dimensions, as codecs need
    (tmp_path / "config.json").write_text(json.dumps({**config, **heads}))
    monkeypatch.setattr(custom_codec, "PROMPT", "ten bytes ")
    custom_codec.main(str(tmp_path), load_format="dummy")
    names = [line.partition(": ")[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["full", "turbo:values=byte-rows", "turboquant-4:keys=byte-rows,values=byte-rows"]


def test_rows_are_off_by_half_a_step_at_most(rows: int = 50) -> None:
    codec, values = custom_codec.ByteRows(), torch.randn(rows, 64)
    codes, scale = codec.encode(values, None)
    off = (codec.decode(codes, scale, None, 64) - values).abs()
    # A scale in float16 is off by 2**-11 of itself at most, which 127 steps multiply.
    assert (off <= scale.float() * (0.5 + 127 * 2**-11)).all()


@pytest.mark.parametrize(
    ("name", "id", "message"),
    [
        ("mine", 9, "codec 'mine' has id 9: ids below 1000 are for shadowkv's own codecs"),
        ("mine:8", 1001, "'mine:8' is no valid name"),
    ],
)
def test_ids_and_names_are_checked(name: str, id: int, message: str) -> None:
    codec = custom_codec.ByteRows()
    codec.name, codec.id = name, id
    with pytest.raises(ValueError, match=message):
        codecs.register(codec)
    assert name not in codecs.ROW_CODECS
