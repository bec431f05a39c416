"""Models that are cut up for tensor-parallel ranks: every part is somewhere once, and together they give the logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dense_cache import packed_logits
from families import TINY, build, oracle_logits
from test_families import assert_same, sequences
from thread_group import on_ranks

from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.layers.group import Group
from shadowkv.models import load_config, load_model
from shadowkv.models.checkpoints.stored_weight import FP8_ROWS
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.sharding import Shard, vocabulary_rows
from shadowkv.ops.activation_rows.reference import quantize_tokens
from shadowkv.ops.quantized.rows import QuantizedRows

# Joined files, biases, norms of heads and of outputs, tied and not, MLPs and vocabularies that do not divide.
FAMILIES = ("llama-tied", "llama-bias-head-dim", "qwen2", "qwen3", "phi3", "glm4")


def parts_of(directory: Path, size: int) -> list[list[torch.Tensor]]:
    def logits(group: Group) -> list[torch.Tensor]:
        loaded = load_model(directory, dtype=torch.float32, group=group)
        return packed_logits(loaded.model, sequences())

    return on_ranks(size, logits)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_give_the_logits_of_the_whole(name: str, size: int, tmp_path: Path) -> None:
    """More ranks than kv heads (2, or 4 of phi3) among them: these then have a copy each."""
    oracle = build(name, tmp_path, {"vocab_size": TINY["vocab_size"] - size + 1})
    expected = oracle_logits(oracle, sequences())
    for found in parts_of(tmp_path, size):
        assert_same(found, expected)


def test_heads_that_do_not_divide(tmp_path: Path) -> None:
    """SmolLM2-135M's 9 and 3 heads on two ranks: 6 and 2, 3 and 1."""
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "intermediate_size": 100}
    oracle = build("llama-tied", tmp_path, sizes)
    config = load_config(tmp_path)
    assert [Shard(config, rank, 2).config.shape.num_kv_heads for rank in (0, 1)] == [2, 1]
    assert [Shard(config, rank, 2).config.shape.num_query_heads for rank in (0, 1)] == [6, 3]
    for found in parts_of(tmp_path, 2):
        assert_same(found, oracle_logits(oracle, sequences()))


@pytest.mark.parametrize(("heads", "values", "least"), [(4, "rotated-3bit", 640), (3, "rotated-4bit", 1280)])
def test_the_whole_models_heads_decide_whether_keys_are_narrow(
    heads: int, values: str, least: int, tmp_path: Path
) -> None:
    build("llama", tmp_path, {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 128})
    for shard in (Shard(load_config(tmp_path), rank, 2) for rank in (0, 1)):
        spec = Layout(shard.policy(preset("turbo")), shard.config.shape, torch.float32, 2000).spec
        assert shard.config.shape.kv_dim < 512 and (spec.values, spec.min_budget) == (values, least)


def test_scales_of_rows_stay_with_their_codes(tmp_path: Path) -> None:
    build("llama", tmp_path)
    weight = torch.randn(64, 48)
    shard = Shard(load_config(tmp_path), 1, 2)
    codes, scale = quantize_tokens(weight)
    ((rows, part),) = shard.pieces(
        "layers.0.attention.out.weight", 0, 48, QuantizedRows((codes[:48], scale[:48]), FP8_ROWS)
    )
    assert (rows.start, rows.stop) == (0, 48)
    assert isinstance(part, QuantizedRows)
    assert torch.equal(part.tensors[0].float(), codes[:48, 24:].float()) and torch.equal(part.tensors[1], scale[:48])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("heads", [(12, 4), (6, 1), (9, 3), (8, 8), (14, 2)])
def test_every_number_is_on_the_ranks_that_use_it(heads: tuple[int, int], size: int, tmp_path: Path) -> None:
    build("llama-bias-head-dim", tmp_path)
    config = load_config(tmp_path)
    config = replace(config, num_query_heads=heads[0], num_kv_heads=heads[1], intermediate_size=160)
    shards = [Shard(config, rank, size) for rank in range(size)]
    q, kv, d, inner = heads[0] * 16, heads[1] * 16, config.hidden_size, config.intermediate_size
    sizes = config.shape.heads
    assert [head for shard in shards for head in range(*shard.query_heads(sizes))] == list(range(heads[0]))
    for shard in shards:
        group, (first, _), (query, _) = sizes.group, shard.kv_heads(sizes), shard.query_heads(sizes)
        own = shard.config.shape
        assert [(query + n) // group for n in range(own.num_query_heads)] == [
            first + n // own.group for n in range(own.num_query_heads)
        ]
    for name, count, width in (
        ("embedding", config.vocab_size, d),
        ("layers.1.attention.qkv.weight", q + 2 * kv, d),
        ("layers.1.attention.qkv.bias", q + 2 * kv, 0),
        ("layers.1.attention.out.weight", d, q),
        ("layers.1.attention.out.bias", d, 0),
        ("layers.1.mlp.gate_up.weight", 2 * inner, d),
        ("layers.1.mlp.down.weight", d, inner),
        ("layers.1.mlp_norm.weight", d, 0),
    ):
        whole = torch.arange(count * max(1, width)).reshape((count, width) if width else (count,))
        seen = [
            part
            for shard in shards
            for start, stop in ((0, count // 2), (count // 2, count))
            for _, part in shard.pieces(name, start, stop, whole[start:stop])
        ]
        found = torch.cat([part.flatten() for part in seen])
        copied = ("qkv" in name and size > heads[1]) or "norm" in name
        assert set(found.tolist()) == set(range(whole.numel()))
        assert copied or len(found) == whole.numel()


def test_the_vocabulary_is_cut_into_equal_parts(tmp_path: Path) -> None:
    build("llama", tmp_path)
    config: ModelConfig = replace(load_config(tmp_path), vocab_size=97)
    assert [Shard(config, rank, 4).vocabulary for rank in range(4)] == [(0, 25), (25, 50), (50, 75), (75, 97)]
    assert vocabulary_rows(config, 4) == 25


def test_more_ranks_than_heads_are_refused(tmp_path: Path) -> None:
    build("llama", tmp_path)
    with pytest.raises(ValueError, match="tensor_parallel_size=5 is more than the model's 4 query heads"):
        load_model(tmp_path, group=Group(0, 5))


def test_an_mlp_that_is_too_narrow_is_refused(tmp_path: Path) -> None:
    build("llama", tmp_path, {"intermediate_size": 32})
    with pytest.raises(ValueError, match="tensor_parallel_size=3 is too much for intermediate_size=32"):
        load_model(tmp_path, group=Group(2, 3))
