"""The peer's bench counts as ours does: driven here with an engine of a few lines in vLLM's place."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
from sweep_rows import read

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "peer"))

import bench_vllm
from peer_drive import MEASURED, SETTLING, Driver


class Engine:
    """Answers every request with a token a step; one more request begins with each step."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, int]] = []
        self.running: dict[str, int] = {}

    def add_request(self, name, prompt, params) -> None:
        assert all(isinstance(token, int) for token in prompt["prompt_token_ids"])
        self.waiting.append((name, params))

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[SimpleNamespace]:
        if self.waiting:
            self.running.update([self.waiting.pop(0)])
        outputs = [SimpleNamespace(request_id=n, outputs=[SimpleNamespace(token_ids=[7])]) for n in self.running]
        self.running = {name: left - 1 for name, left in self.running.items() if left > 1}
        return outputs


@pytest.fixture
def driver() -> Driver:
    return Driver(Engine(), lambda tokens: tokens)


def test_rows_have_the_columns_of_our_sweeps(driver, tmp_path):
    args = Namespace(out=tmp_path, engine="serve", contexts=[50, 80], cases=[(6, 40, 5)], decode=[(3, 60)], repeats=2)
    row = {"engine": "vllm 0.26.0", "kv": "bf16", "prefill": "dense", "quantization": "fp8"}
    for args.engine in ("serve", "decode", "serve"):
        bench_vllm.measure(args, driver, row)
    assert [one["context"] for one in read(tmp_path / "prefill.csv")] == ["50", "80"]
    (case,) = read(tmp_path / "mixed.csv")
    assert float(case["wall_s"]) * float(case["output_tokens_per_s"]) == pytest.approx(30, rel=0.01)
    (batch,) = read(tmp_path / "decode.csv")
    assert float(batch["step_ms"]) * float(batch["decode_tokens_per_s"]) == pytest.approx(3000, rel=0.01)


def test_a_batch_that_never_decodes_together_has_no_figure(driver, monkeypatch):
    times = [[float(step) for step in range(first, first + SETTLING + MEASURED)] for first in (0, 1)]
    monkeypatch.setattr(driver, "run", lambda *_: (0.0, times))
    with pytest.raises(RuntimeError, match="2 x 60 never decoded together"):
        driver.decode(2, 60)


def test_answers_that_are_too_short_have_no_figure(driver):
    driver._sampling = lambda tokens: tokens - 1
    with pytest.raises(RuntimeError, match="instead of"):
        driver.run(10, [3])


def test_cases_are_written_as_requests_prompt_and_answer():
    assert bench_vllm.numbers("48x61184+512") == (48, 61184, 512)
    assert bench_vllm.numbers("16x61440") == (16, 61440)
