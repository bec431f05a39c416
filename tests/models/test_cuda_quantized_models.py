"""Models whose weights stay in few bits on a GPU: logits and answers are those of the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from quantized_files import write_quantized
from test_experts import WIDE
from test_gpt_oss import write_mxfp4

from shadowkv import SamplingParams
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.models.loader import load_model
from shadowkv.ops.quantized_matmul import humming
from shadowkv.ops.registry import Ops

if reasons := humming.missing():
    pytest.skip("; ".join(reasons), allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def few_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(humming, "BATCHES", (8,))
        patch.setattr(humming, "FEW_OF_EXPERTS", (8,))
        patch.setattr(humming, "OF_EACH", (8,))
        yield


@pytest.mark.parametrize("kind", ["awq", "modelopt nvfp4", "mxfp4"])
def test_chances_are_those_of_the_numbers(kind: str, tmp_path: Path) -> None:
    """A prompt's log-probabilities, in two passes of its layers, and those of greedy steps in graphs."""
    files, plain = write_quantized(tmp_path, kind)
    assert load_model(files, device="cuda").model.forms
    errors, of_bfloat16 = errors_of(files, plain)
    assert len(errors) == 149
    assert errors.norm() < 3 * of_bfloat16.norm(), (errors.norm(), of_bfloat16.norm())


def errors_of(files: Path, plain: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a prompt's log-probabilities, with quantized weights and with those in bfloat16; float32 is right.

    Where projections multiply 8-bit floats, they do so with both weights: activations of 8 bits lose far more than
    those of bfloat16.
    """
    arithmetic = load_model(files, device="cuda").config.quantization
    found, rounded, exact = chances(files), chances(plain, quantization=arithmetic), chances(plain, dtype="float32")
    return (found - exact).abs(), (rounded - exact).abs()


def chances(path: Path, dtype: str = "bfloat16", quantization: str | None = None) -> torch.Tensor:
    """Log-probabilities of a prompt's tokens, while greedy steps follow them."""
    settings = {"device": "cuda", "dtype": dtype, "quantization": quantization, "kv": "full", "max_num_seqs": 4}
    engine = Engine(EngineConfig(model=str(path), **settings))
    try:
        sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1, prompt_logprobs=0)
        engine.add_request("0", [3 + i * 7 % 80 for i in range(150)], sampling)
        found: list[float] = []
        while engine.has_work:
            for output in engine.step():
                found += [one.logprob for one in output.prompt_logprobs or [] if one is not None]
        return torch.tensor(found)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("kind", "case"),
    [("awq", "qwen3_moe"), ("nvfp4", "glm4_moe"), ("fp8, Qwen3's blocks", "qwen3_moe"), ("mxfp4", "gpt_oss")],
)
def test_experts_are_those_of_the_numbers(kind: str, case: str, tmp_path: Path) -> None:
    """Of their outputs, since a token whose logits are near may be given to others; and a prompt, of whose tokens few
    are. 8-bit floats stay in 8 bits beside 8-bit arithmetic."""
    paths = write_mxfp4(tmp_path) if case == "gpt_oss" else write_quantized(tmp_path, kind, case, **WIDE)
    generator = torch.Generator("cuda").manual_seed(0)
    weights, chosen = torch.rand(40, 8, generator=generator, device="cuda").topk(3)
    outputs, x = [], None
    for path in paths:
        model = load_model(path, device="cuda").model
        model.use(Ops("cuda"))
        experts = model.layers[1].mlp.experts
        if x is None:
            assert isinstance(experts.down.weight.of_experts, humming.PackedExperts)
            x = torch.randn(40, experts.down.out_features, generator=generator, device="cuda").bfloat16()
        outputs.append(experts(x, weights, chosen))
    torch.testing.assert_close(*outputs, rtol=0, atol=2e-2 * float(outputs[1].abs().amax()))
    errors, of_plain = errors_of(*paths)
    assert errors.median() < 3 * of_plain.median(), (errors.median(), of_plain.median())
