"""Every family loaded by this engine gives transformers' logits, in one piece and in blocks."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dense_cache import DenseBatch, DenseCache, packed_logits
from families import CASES, TINY, build, learned_buffers, oracle_logits
from precision import InFloat64, assert_close_like_lowp, draws
from safetensors.torch import load_file, save_file
from thread_group import on_ranks

from shadowkv.layers.group import Group
from shadowkv.models import load_config, load_model
from shadowkv.ops.registry import NAMES, Ops

LENGTHS = (1, 7, 23, 12)


def sequences(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, TINY["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32
        assert other.abs().max() > 0.1
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=0)


def assert_ranks_give(size: int, model: Path, theirs: torch.nn.Module) -> None:
    """Each of ``size`` ranks has the logits of the whole model."""

    def logits(group: Group) -> list[torch.Tensor]:
        return packed_logits(load_model(model, dtype=torch.float32, group=group).model, sequences())

    for found in on_ranks(size, logits):
        assert_same(found, oracle_logits(theirs, sequences()))


@pytest.mark.parametrize("name", CASES)
def test_logits_match_transformers(name: str, tmp_path: Path) -> None:
    oracle = build(name, tmp_path)
    max_model_len = 32 if name == "phi3-longrope" else None
    loaded = load_model(tmp_path, dtype=torch.float32, max_model_len=max_model_len)
    assert loaded.config == load_config(tmp_path, max_model_len)
    assert_same(packed_logits(loaded.model, sequences()), oracle_logits(oracle, sequences()))
    expected = sum(
        weight.numel() for weight in (*oracle.parameters(), *(buffer for _, buffer in learned_buffers(oracle)))
    )
    assert loaded.model.num_parameters == expected
    assert loaded.model.num_bytes + loaded.model.table_bytes.total() == 4 * expected


@pytest.mark.parametrize("name", ["qwen2-window", "qwen2_moe-window"])
def test_which_layers_have_a_window_older_configs_do_not_list(name: str, tmp_path: Path) -> None:
    build(name, tmp_path)
    file, listed = tmp_path / "config.json", load_config(tmp_path)
    content = json.loads(file.read_text())
    assert len(set(content.pop("layer_types"))) == 2
    file.write_text(json.dumps(content))
    assert load_config(tmp_path) == listed


@pytest.mark.parametrize("prefixes", [("language_model.model.", ""), ("model.language_model.", "model.")], ids=str)
def test_the_text_model_of_gemma3_is_loaded_alone(prefixes: tuple[str, str], tmp_path: Path) -> None:
    oracle = build("gemma3-linear", tmp_path)
    file = tmp_path / "config.json"
    text = json.loads(file.read_text())
    for name in ("hidden_activation", "eos_token_id", "tie_word_embeddings"):
        del text[name]  # as Transformers' defaults are
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {}, "eos_token_id": [2, 5]}
    file.write_text(json.dumps(whole))
    weights = load_file(tmp_path / "model.safetensors")
    weights = {f"{prefixes[0]}{name.removeprefix('model.')}": weight for name, weight in weights.items()}
    weights |= {f"{prefixes[1]}{name}": torch.ones(3) for name in ("vision_tower.x.weight", "multi_modal_projector.y")}
    save_file(weights, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path, dtype=torch.float32)
    assert loaded.config.eos_token_ids == (2, 5)
    assert load_config(tmp_path, hf_overrides={"sliding_window": 7}).layer_kinds[0].window == 7
    assert_same(packed_logits(loaded.model, sequences()), oracle_logits(oracle, sequences()))
    save_file({**weights, "audio_tower.z": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected: audio_tower\.z"):
        load_model(tmp_path)


def test_norms_of_gemma3_are_those_of_transformers_in_bfloat16(tmp_path: Path) -> None:
    """Bit by bit: 1 + w has more bits than bfloat16."""
    oracle = build("gemma3", tmp_path, {"query_pre_attn_scalar": 16}).bfloat16()
    oracle.save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="bfloat16").model
    model.use(Ops())
    names = {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "post_mlp_norm",
        "self_attn.q_norm": "attention.query_norm",
        "self_attn.k_norm": "attention.key_norm",
    }
    pairs = [(oracle.model.norm, model.norm)]
    for theirs, ours in names.items():
        pairs.append((oracle.model.layers[1].get_submodule(theirs), model.layers[1].get_submodule(ours)))
    for their, mine in pairs:
        x = torch.randn(9, len(their.weight), generator=torch.Generator().manual_seed(1)).bfloat16()
        assert mine.weight.dtype == torch.float32 and mine(x).dtype == torch.bfloat16
        assert (mine.weight != mine.weight.bfloat16()).any()
        assert torch.equal(mine(x), their(x))


def test_longrope_uses_the_long_factors_for_long_limits(tmp_path: Path) -> None:
    oracle = build("phi3-longrope", tmp_path)
    # transformers picks the set by the length of the call, so every sequence must be past the original 32 tokens.
    texts = sequences((40, 65, 33))
    loaded = load_model(tmp_path, dtype=torch.float32)
    assert loaded.config.max_position == 256
    assert_same(packed_logits(loaded.model, texts), oracle_logits(oracle, texts))
    short = load_model(tmp_path, dtype=torch.float32, max_model_len=20)
    assert short.config.max_position == 32
    assert short.config.rope.factors != loaded.config.rope.factors


def test_sharded_files(tmp_path: Path) -> None:
    oracle = build("qwen2", tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded = load_model(tmp_path, dtype=torch.float32)
    assert_same(packed_logits(loaded.model, sequences()), oracle_logits(oracle, sequences()))


@pytest.mark.parametrize(
    "name", ["llama-3.1", "llama-yarn", "phi3-longrope", "glm4", "qwen3", "glm4_moe", "gpt_oss", "minimax_m2"]
)
def test_old_and_new_config_forms_agree(name: str, tmp_path: Path) -> None:
    build(name, tmp_path)
    file = tmp_path / "config.json"
    new = json.loads(file.read_text())
    parameters = new.pop("rope_parameters")
    new_config = load_config(tmp_path)
    old = {**new, "rope_theta": parameters.pop("rope_theta")}
    if "partial_rotary_factor" in parameters:
        old["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
    parameters["type"] = parameters.pop("rope_type")
    old["rope_scaling"] = None if parameters["type"] == "default" else parameters
    file.write_text(json.dumps(old))
    assert load_config(tmp_path) == new_config


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "glm4", "qwen2_moe", "glm4_moe", "gpt_oss", "minimax_m2"])
@pytest.mark.parametrize("block", [1, 5, 64])
def test_blocks_equal_the_whole_layer(name: str, block: int, tmp_path: Path) -> None:
    build(name, tmp_path)
    model = load_model(tmp_path, dtype=torch.float32).model
    model.use(Ops(overrides=dict.fromkeys(NAMES, "reference")))
    layer = model.layers[1]
    batch = DenseBatch.of(list(LENGTHS))
    total = sum(LENGTHS)
    x = torch.randn(total, TINY["hidden_size"], generator=torch.Generator().manual_seed(1))
    with InFloat64():
        exact = torch.add(*deepcopy(layer).double().start(x.double(), None, DenseCache(model.config.rope), batch)())
    whole = draws(lambda: torch.add(*layer.start(x, None, DenseCache(model.config.rope), batch)()))
    model.use(Ops())
    cache = DenseCache(model.config.rope)
    blocks = [(start, min(start + block, total)) for start in range(0, total, block)]
    ended = [layer.start(x[start:stop], None, cache, batch.block(start, stop))() for start, stop in blocks]
    assert_close_like_lowp(torch.cat([torch.add(*one) for one in ended]), exact, *whole)
    wanted = torch.tensor([3, 0, total - 1])
    some = torch.add(*layer.start(x, None, DenseCache(model.config.rope), replace(batch, needed=wanted))())
    assert_close_like_lowp(some, exact[wanted], *(one[wanted] for one in whole))


def test_decode_steps_equal_one_pass(tmp_path: Path) -> None:
    build("glm", tmp_path)
    model = load_model(tmp_path, dtype=torch.float32).model
    texts = sequences((9, 9, 9))
    whole = packed_logits(model, texts)
    cache = DenseCache(model.config.rope)
    for position in range(9):
        batch = DenseBatch.of([1, 1, 1], start=position)
        x = model.embed(torch.tensor([text[position] for text in texts]))
        for layer in model.layers:
            x = torch.add(*layer.start(x, None, cache, batch)())
        step = model.logits(x)
        torch.testing.assert_close(step, torch.stack([logits[position] for logits in whole]), atol=1e-4, rtol=0)


def test_low_precision_weights_run(tmp_path: Path) -> None:
    build("llama", tmp_path)
    model = load_model(tmp_path, dtype="bfloat16").model
    assert model.embedding.dtype == torch.bfloat16
    model.use(Ops())
    x = model.embed(torch.tensor([5, 6]))
    assert x.dtype == torch.bfloat16
    assert model.logits(x).dtype == torch.float32
