"""An engine over weights in 8-bit floats, on the CPU by the ops' references."""

from __future__ import annotations

from typing import Any

import pytest
from test_engine import GREEDY, assert_empty, drain, prompt, small_blocks, tokens

from shadowkv.models import loader


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The references stand in for hardware."""
    monkeypatch.setattr(loader, "unfit", lambda device, dtype: None)


@pytest.mark.parametrize("kv", ["full", "shadowkv"])
def test_answers_are_those_of_a_sequence_alone(
    anywhere: None, make: Any, monkeypatch: pytest.MonkeyPatch, kv: str
) -> None:
    """Whole and blockwise prefills and decode steps quantize each token by itself."""
    small_blocks(monkeypatch, 256)
    settings = {"kv": kv, "device": "cpu", "dtype": "float32", "quantization": "fp8"}
    together, alone = make(**settings), make(**settings)
    for number, length in enumerate((700, 5, 64)):
        together.add_request(str(number), prompt(number, length), GREEDY)
    outputs = drain(together)
    for number, length in enumerate((700, 5, 64)):
        alone.add_request(str(number), prompt(number, length), GREEDY)
        assert tokens(drain(alone)[str(number)]) == tokens(outputs[str(number)])
    assert_empty(together)


def test_start_up_lines_say_it(anywhere: None, make: Any) -> None:
    exact, low = (make(kv="full", device="cpu", dtype="bfloat16", quantization=name).notes for name in (None, "fp8"))
    assert exact[0].endswith(": 2 layers, bfloat16 on cpu")
    assert low[0].endswith(": 2 layers, bfloat16, fp8 weights on cpu")
    for name in ("quantize_tokens", "scaled_matmul"):
        assert any(line.startswith("kernels reference: ") and name in line for line in low)
        assert not any(name in line for line in exact)


def test_a_cpu_is_refused_with_what_to_do(make: Any) -> None:
    with pytest.raises(ValueError, match=r"quantization='fp8': fp8 needs a GPU of .*the device is cpu; leave it out"):
        make(device="cpu", quantization="fp8")
