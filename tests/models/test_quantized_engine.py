"""Engines over quantized checkpoints, on a CPU: answers as over the numbers that their weights stand for."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from quantized_files import write_quantized

from shadowkv import SamplingParams
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine

PROMPTS = [[random.Random(seed).randrange(3, 90) for _ in range(length)] for seed, length in enumerate((150, 7))]


def answers(
    model: Path, prompts: list[list[int]] = PROMPTS, **options: Any
) -> tuple[list[str], dict[str, list[float]]]:
    """Start-up lines, and the chances of each prompt's tokens and of what follows greedily."""
    engine = Engine(EngineConfig(model=str(model), device="cpu", kv="full", max_num_seqs=4, **options))
    try:
        greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1, prompt_logprobs=0)
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, greedy)
        chances: dict[str, list[float]] = {}
        while engine.has_work:
            for output in engine.step():
                found = chances.setdefault(output.request_id, [])
                found += [one.logprob for one in output.prompt_logprobs or [] if one is not None]
                found += [one.logprob for one in output.logprobs or []]
        return engine.notes, chances
    finally:
        engine.close()


def assert_alike(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    assert found.keys() == expected.keys()
    for name, chances in expected.items():
        assert found[name] == pytest.approx(chances, abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("awq", "int4-g64"),
        ("gptq, zero points", "int4-g64"),
        ("int8", "int8"),
        ("fp8, Qwen3's blocks", "fp8-g128"),
        ("modelopt nvfp4", "nvfp4"),
        ("mxfp4", "mxfp4"),
    ],
)
def test_answers_are_those_of_the_numbers(kind: str, words: str, tmp_path: Path) -> None:
    files, plain = write_quantized(tmp_path, kind)
    _, expected = answers(plain)
    notes, found = answers(files)
    assert notes[0].endswith(f": 2 layers, float32, {words} weights on cpu")
    assert {name: len(chances) for name, chances in found.items()} == {"0": 149 + 12, "1": 6 + 12}
    assert_alike(found, expected)


@pytest.mark.parametrize("kind", ["awq", "modelopt nvfp4"])
def test_two_ranks(kind: str, tmp_path: Path) -> None:
    """Processes over gloo; the MLP is cut in the middle of groups of 64."""
    files, plain = write_quantized(tmp_path, kind)
    assert_alike(answers(files, tensor_parallel_size=2)[1], answers(plain)[1])


def test_random_weights(tmp_path: Path) -> None:
    _, plain = write_quantized(tmp_path, "awq")
    notes, found = answers(plain, load_format="dummy", quantization="nvfp4")
    assert notes[0].endswith(": 2 layers, float32, nvfp4 weights on cpu")
    assert {name: len(chances) for name, chances in found.items()} == {"0": 149 + 12, "1": 6 + 12}
