"""The device of an engine: by name, and a second GPU beside the first; the latter needs two."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path

import pytest
import torch

from shadowkv import LLM, SamplingParams
from shadowkv.engine.startup.loading import current, device_of


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tpu", "is not"),
        ("cuda:x", "is not"),
        ("meta", "is not supported"),
        ("cuda:99", "is not there: .* has [0-9]+ CUDA"),
    ],
)
def test_a_device_that_is_not_there_is_named(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"device='{name}' {message}"):
        device_of(name)


def test_a_cpu_has_nothing_to_make_current() -> None:
    with current(device_of("cpu")):
        assert device_of("cpu") == torch.device("cpu")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 384,
        "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


PARAMS = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)


def llm(model: Path, device: str, kv: str, eager: bool) -> LLM:
    return LLM(
        str(model), load_format="dummy", kv=kv,
        kv_dense_below=0, device=device, enforce_eager=eager, max_num_seqs=4, max_cached_seqs=0,
        max_model_len=4096, gpu_memory_utilization=0.3, host_memory_gib=1.0,
    )  # fmt: skip


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kv", ["full", "shadowkv", "turbo", "turbo-host"])
@pytest.mark.parametrize("eager", [False, True])
def test_the_second_gpu_answers_as_the_first(model: Path, kv: str, eager: bool) -> None:
    draw = random.Random(0)
    prompts = [[draw.randrange(500) for _ in range(length)] for length in (2500, 700, 90)]
    first, second = (llm(model, device, kv, eager) for device in ("cuda:0", "cuda:1"))  # side by side
    assert second.engine.cache.groups[0].store.tiers["device"].arena.device == torch.device("cuda", 1)
    assert second.engine.cache.groups[0].store.tiers["host"].arena.device == torch.device("cuda", 1)
    answers: list[list[int]] = []

    def answer() -> None:  # a thread has a current device of its own
        answers.extend(answer.outputs[0].token_ids for answer in second.generate(prompts, PARAMS))

    thread = threading.Thread(target=answer)
    thread.start()
    thread.join()
    assert answers == [answer.outputs[0].token_ids for answer in first.generate(prompts, PARAMS)]
    assert torch.cuda.current_device() == 0
