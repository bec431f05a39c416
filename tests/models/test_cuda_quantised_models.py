"""Models whose weights stay in few bits on a GPU: logits and answers are those of the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from quantised_files import write_quantised

from shadowkv import SamplingParams
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.models.loader import load_model
from shadowkv.ops.quantised_matmul import humming

if reasons := humming.missing():
    pytest.skip("; ".join(reasons), allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def few_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(humming, "BATCHES", (8,))
        yield


@pytest.mark.parametrize("kind", ["awq", "modelopt nvfp4", "mxfp4"])
def test_chances_are_those_of_the_numbers(kind: str, tmp_path: Path) -> None:
    """A prompt's log-probabilities, in two passes of its layers, and those of greedy steps in graphs."""
    files, plain = write_quantised(tmp_path, kind)
    assert load_model(files, device="cuda").model.forms
    chances = []
    for path in (files, plain):
        engine = Engine(EngineConfig(model=str(path), device="cuda", kv="full", max_num_seqs=4))
        try:
            sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1, prompt_logprobs=0)
            engine.add_request("0", [3 + i * 7 % 80 for i in range(150)], sampling)
            found: list[float] = []
            while engine.has_work:
                for output in engine.step():
                    found += [one.logprob for one in output.prompt_logprobs or [] if one is not None]
            chances.append(torch.tensor(found))
        finally:
            engine.close()
    assert len(chances[0]) == 149
    assert (chances[0] - chances[1]).abs().amax() < 0.1 and (chances[0] - chances[1]).abs().mean() < 0.02
