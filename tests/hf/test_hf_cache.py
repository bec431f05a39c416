"""``ShadowKVCache``: generate of transformers gives the engine's tokens, and what it cannot do is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from shadowkv import LLM, SamplingParams
from shadowkv.engine.execution.forward import BLOCK_TOKENS
from shadowkv.hf import ShadowKVCache

LENGTH, NEW, MOST = 600, 20, 1024
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# Nothing is sampled: of random weights that all weigh about the same, rounding decides which tokens that would be.
POLICIES = (
    *("full", "turbo:dense_below=0,budget=0.1,sampled=0.0", "quest:dense_below=0,budget=0.1", "fp8:dense_below=0"),
    "shadowkv:dense_below=0,outliers=2,budget=0.1",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with attention as sharp as a trained one's: an answer tells which tokens were attended to."""
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        **TINY,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 1024,
            "attention_factor": 1.4,
        },
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1)
    model.save_pretrained(path)
    Tokenizer(models.BPE(vocab={chr(32 + i): i for i in range(90)}, merges=[])).save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="shadowkv", dtype=torch.float32).eval()


def prompts(count: int, length: int, seed: int = 0) -> torch.Tensor:
    """Without 0, which pads."""
    return torch.randint(1, 90, (count, length), generator=torch.Generator().manual_seed(seed))


def engine_tokens(directory: Path, kv: str, texts: list[list[int]], new: int = NEW) -> list[list[int]]:
    llm = LLM(str(directory), kv=kv, max_num_seqs=4, max_model_len=MOST)
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, cache_prompt=False)
    return [answer.outputs[0].token_ids for answer in llm.generate(texts, params)]


def generate(model: Any, ids: torch.Tensor, cache: ShadowKVCache, **options: Any) -> list[list[int]]:
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    out = model.generate(ids, past_key_values=cache, **options)
    return out[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("kv", POLICIES)
def test_tokens_are_the_engines(directory: Path, model: Any, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BLOCK_TOKENS, "cpu", 500)
    ids = prompts(2, LENGTH)
    cache = ShadowKVCache(model, kv, max_model_len=MOST)
    assert generate(model, ids, cache) == engine_tokens(directory, kv, ids.tolist())
    assert cache.get_seq_length() == LENGTH + NEW - 1
    assert cache.kv_cache is not None
    assert all((one.compressed > 500) == (kv != "full") for one in cache.batch.sequences)


FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "phi3": {"head_dim": 32, "partial_rotary_factor": 0.5},
    "glm": {"head_dim": 32, "eos_token_id": 95},
    "glm4": {"head_dim": 32, "eos_token_id": 95},
    "gpt_oss": {"head_dim": 32, "sliding_window": 40, "num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_rotation_is_undone(family: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**TINY, **FAMILIES[family]})
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = prompts(1, 100)
    with torch.no_grad():
        expected = plain(ids).logits
        plain.set_attn_implementation("shadowkv")
        cache = ShadowKVCache(plain, "full", max_model_len=128)
        found = [plain(part, past_key_values=cache).logits for part in ids.split([60, 30, *[1] * 10], dim=1)]
    torch.testing.assert_close(torch.cat(found, dim=1), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prompts_are_answered_as_alone(directory: Path, model: Any, side: str) -> None:
    """generate itself goes on from the last column, which right padding would be: that is for forward passes."""
    kv, lengths = "quest:dense_below=0,budget=0.1", (LENGTH, 450)
    ids, mask = prompts(2, LENGTH), torch.zeros(2, LENGTH, dtype=torch.int64)
    for row, length in enumerate(lengths):
        there = slice(LENGTH - length, LENGTH) if side == "left" else slice(length)
        mask[row, there] = 1
    texts = [row[there.bool()].tolist() for row, there in zip(ids, mask)]
    cache = ShadowKVCache(model, kv, max_model_len=MOST)
    if side == "left":
        assert generate(model, ids, cache, attention_mask=mask) == engine_tokens(directory, kv, texts)
        return
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
    first = [[int(logits[row, length - 1].argmax())] for row, length in enumerate(lengths)]
    assert first == engine_tokens(directory, kv, texts, new=1)


@pytest.mark.parametrize("kv", ["full", "quest:dense_below=0,budget=1.0"])
def test_a_further_turn_goes_on_from_the_cache(directory: Path, model: Any, kv: str) -> None:
    """Where nothing is lost a second turn is answered as if all of it had been the prompt."""
    ids = prompts(2, 500)
    cache = ShadowKVCache(model, kv, max_model_len=MOST)
    answer = torch.tensor(generate(model, ids, cache))
    more = torch.cat((ids, answer, prompts(2, 150, seed=1)), dim=1)
    assert generate(model, more, cache) == engine_tokens(directory, kv, more.tolist())
    assert cache.get_seq_length() == more.shape[1] + NEW - 1


def test_turns_of_several_segments_fit(model: Any) -> None:
    """Every segment has a state and outliers of its own."""
    cache = ShadowKVCache(model, "shadowkv:dense_below=0,budget=64,outliers=4,local=8", max_model_len=2048)
    text = prompts(3, 300)
    for seed in range(5):
        generate(model, text, cache, max_new_tokens=2)
        text = torch.cat((text, prompts(3, 340, seed)), dim=1)
    assert all(len(one.path) > 2 for one in cache.batch.sequences)


def test_a_reset_cache_takes_another_batch(model: Any) -> None:
    cache = ShadowKVCache(model, "full", max_model_len=MOST)
    first = generate(model, prompts(1, 70), cache)
    with pytest.raises(ValueError, match="holds 1 sequences, but the batch has 2"):
        generate(model, prompts(2, 200), cache)
    cache.reset()
    again = generate(model, torch.cat((prompts(1, 70), prompts(1, 70, seed=1))), cache)
    assert again[0] == first[0]
    assert again[1] != first[0]


def test_a_pass_that_ended_half_way_is_not_gone_on_with(model: Any) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    ids = prompts(1, 70)
    expected = generate(model, ids, ShadowKVCache(model, "full", max_model_len=MOST))
    cache = ShadowKVCache(model, "full", max_model_len=MOST)
    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(model, ids, cache)
    hook.remove()
    with pytest.raises(RuntimeError, match="was interrupted"):
        generate(model, ids, cache)
    cache.reset()
    assert generate(model, ids, cache) == expected


def test_what_cannot_be_is_refused(model: Any, directory: Path) -> None:
    ids = prompts(1, 30)
    with pytest.raises(ValueError, match="needs a ShadowKVCache"):
        model.generate(ids, max_new_tokens=2)
    with pytest.raises(NotImplementedError, match="num_beams=1"):
        generate(model, ids, ShadowKVCache(model, max_model_len=MOST), num_beams=2)
    with pytest.raises(NotImplementedError, match="forget tokens"):
        ShadowKVCache(model, max_model_len=MOST).crop(-1)
    with pytest.raises(ValueError, match="reaches 33 tokens, more than max_model_len=32"):
        generate(model, ids, ShadowKVCache(model, max_model_len=32))
    with pytest.raises(ValueError, match="only padding"):
        generate(model, prompts(2, 3), ShadowKVCache(model, max_model_len=32),
                 attention_mask=torch.tensor([[1, 1, 1], [0, 0, 0]]))  # fmt: skip
    with pytest.raises(ValueError, match=r"attention_mask has the shape \(1, 1, 30, 30\)"), torch.no_grad():
        model(ids, attention_mask=torch.ones(1, 1, 30, 30), past_key_values=ShadowKVCache(model, max_model_len=32))
    cache = ShadowKVCache(model, max_model_len=MOST)
    with pytest.raises(ValueError, match="no gradients"):
        model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="unknown KV preset"):
        ShadowKVCache(model, "none", max_model_len=MOST)
    with pytest.raises(ValueError, match="more than the 2048 positions"):
        ShadowKVCache(model, max_model_len=4096)
    plain = AutoModelForCausalLM.from_pretrained(directory)
    with pytest.raises(ValueError, match="attends by 'sdpa'"):
        ShadowKVCache(plain, max_model_len=MOST)


def test_what_is_missing_is_named_where_transformers_is_not_installed() -> None:
    code = "import sys; sys.modules['transformers'] = None; import shadowkv.hf"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode and "ImportError: shadowkv.hf needs transformers 5 or later" in done.stderr
    assert "-m pip install 'transformers>=5'" in done.stderr


def test_layers_with_a_rope_of_their_own_are_refused() -> None:
    config = AutoConfig.for_model("gemma3_text", **{**TINY, "head_dim": 32})
    model = AutoModelForCausalLM.from_config(config)
    model.set_attn_implementation("shadowkv")
    with pytest.raises(ValueError, match="gemma3_text models have layers with a separate RoPE: use an engine"):
        ShadowKVCache(model, "full", max_model_len=MOST)


def test_layers_with_a_window_attend_within_it() -> None:
    config = Qwen2Config(
        **{**TINY, "num_hidden_layers": 2},
        sliding_window=100,
        use_sliding_window=True,
        layer_types=["sliding_attention", "full_attention"],
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    prompts = torch.randint(1, TINY["vocab_size"], (2, 300))
    options = {"max_new_tokens": 40, "do_sample": False}
    wanted = model.generate(prompts, **options)
    model.set_attn_implementation("shadowkv")
    assert torch.equal(
        model.generate(prompts, past_key_values=ShadowKVCache(model, "full", max_model_len=MOST), **options), wanted
    )
