"""After the warm-up no request waits for a kernel to be compiled; needs a GPU."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine import drain, prompt, tokens

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.engine.warmup import warm_up

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 512,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "tie_word_embeddings": True,
}  # fmt: skip

TOGETHER = [[90], [3], [40, 300, 700], [9000], [9001, 5, 6000], [16385]]
"""Lengths of prompts that come at once: odd ones, whose pointers and sizes are aligned otherwise than a warm-up's."""

LATER = (33, 2500)
"""Tokens of later turns."""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that Triton makes or reads from its cache on disk, as in a process in which there were none."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    for kernel in gc.get_objects():
        if isinstance(kernel, JITFunction):
            kernel.device_caches.clear()
    names: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **of: names.append(of["repr"]))
    return names


@pytest.mark.parametrize("kv", ["full", "turbo", "turboquant-3"])
def test_nothing_is_compiled_after_the_warm_up(kv: str, tmp_path: Path, compiled: list[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options: dict[str, Any] = {"max_num_seqs": 4, "max_cached_seqs": 4, "kv_dense_below": 2048, "max_model_len": 24576}
    engine = Engine(
        EngineConfig(model=str(tmp_path), load_format="dummy", kv=kv, gpu_memory_utilization=0.5, **options)
    )
    warm_up(engine)
    assert compiled, "the warm-up compiles"
    late: dict[tuple[Any, ...], list[str]] = {}
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=70, temperature=temperature, ignore_eos=True)
        for number, lengths in enumerate(TOGETHER):
            prompts = {str(length): prompt(number, length) for length in lengths}
            for more in (0, *LATER):  # later turns go on with what is kept of the ones before
                before = len(compiled)
                for name, text in prompts.items():
                    text += prompt(more, more)
                    engine.add_request(name, list(text), params)
                for name, outputs in drain(engine).items():
                    prompts[name] += tokens(outputs)
                    assert len(tokens(outputs)) == 70
                if compiled[before:]:
                    late[lengths[0], more, temperature] = compiled[before:]
    assert not late
