"""MiniMax-M2: heads that are normalised together, on ranks too, its files, and configs that cannot be run."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_files import edit_json
from dense_cache import packed_logits
from families import build
from quantized_files import write_quantized
from safetensors.torch import load_file
from test_families import sequences
from test_quantized_formats import assert_close
from thread_group import on_ranks

from shadowkv.layers.group import Group
from shadowkv.layers.norm import JointNorm
from shadowkv.models import load_config, load_model
from shadowkv.models.loader import load_plan
from shadowkv.models.sharding import Shard
from shadowkv.models.sources import config_file
from shadowkv.ops.registry import Ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [(0, 2, 4), (0, 1, 3, 4)], ids=str)
def test_ranks_normalise_all_heads_together(cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    """Heads are of very different sizes: a rank's own mean would show."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, 16, generator=generator) * torch.tensor([0.1, 1, 10, 100]).view(4, 1)
    weight, device = 1 + 0.3 * torch.randn(64, generator=generator), torch.device("cpu")

    def part(group: Group, start: int, stop: int) -> torch.Tensor:
        norm = JointNorm(stop - start, 4, 16, 1e-6, dtype=dtype, device=device, group=group)
        norm.weight.copy_(weight[16 * start : 16 * stop])
        norm.ops = Ops()
        return norm(x[:, start:stop].to(dtype))

    whole = part(Group(), 0, 4)
    assert whole.dtype == dtype
    ends = list(pairwise(cuts))
    found = torch.cat(on_ranks(len(ends), lambda group: part(group, *ends[group.rank])), 1)
    torch.testing.assert_close(found, whole, atol=1e-6, rtol=1e-6 if dtype == torch.float32 else 2**-7)


def test_more_ranks_than_kv_heads_are_refused(tmp_path: Path) -> None:
    build("minimax_m2", tmp_path)
    config = load_config(tmp_path)
    assert Shard(config, 1, 2).config.normed_heads == config.normed_heads == (4, 2)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=3 is more than the model's 2 kv heads"):
        Shard(config, 0, 3)


def test_files_have_the_names_of_published_ones(tmp_path: Path) -> None:
    """And load without a word: the oracle of the families' tests reads them."""
    build("minimax_m2", tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert {f"model.layers.1.block_sparse_moe.experts.7.w{number}.weight" for number in (1, 2, 3)} <= names
    assert "model.layers.1.block_sparse_moe.e_score_correction_bias" in names
    assert load_model(tmp_path).notes == ()


def test_fp8_in_blocks(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    files, plain = write_quantized(tmp_path, "fp8, Qwen3's blocks", "minimax_m2", **sizes)
    published = json.loads(config_file("minimax-m2").read_text())["quantization_config"]
    blocks = json.loads((files / "config.json").read_text())["quantization_config"]["weight_block_size"]
    edit_json(files / "config.json", quantization_config={**published, "weight_block_size": blocks})
    ours, theirs = load_model(files), load_model(plain)
    assert ours.model.num_bytes < 0.5 * theirs.model.num_bytes
    assert_close(packed_logits(ours.model, sequences()), packed_logits(theirs.model, sequences()))
    for found in on_ranks(2, lambda group: packed_logits(load_model(files, group=group).model, sequences())):
        assert_close(found, packed_logits(theirs.model, sequences()))


def test_the_published_config() -> None:
    config, _ = load_plan("minimax-m2")
    assert (config.rope.dim, config.head_dim, config.max_position) == (64, 128, 196608)
    assert config.normed_heads == (48, 8) and config.draft_layers == 3
    assert config.experts is not None and config.experts.routing.experts == 256
    assert config.quantization == "fp8"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scoring_func": "softmax"}, "scoring_func=softmax is not supported, only sigmoid"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type=per_head is not supported, only per_layer"),
        ({"use_qk_norm": False}, "use_qk_norm=False is not supported, only True"),
        ({"use_routing_bias": False}, "use_routing_bias=False is not supported, only True"),
        ({"shared_intermediate_size": 64}, "shared_intermediate_size=64 is not supported, only 0"),
        (
            {"attn_type_list": [1, 0]},
            r"attn_type_list=\[1, 0\] is not supported, only 1, full attention, for each layer",
        ),
        ({"num_local_experts": None}, "num_local_experts is missing"),
        ({"rotary_dim": 0}, "rotary_dim=0 is not a whole number from 1"),
        ({"rotary_dim": 32, "rope_parameters": None}, "32 rotating dimensions: must be an even number from 2 to"),
    ],
)
def test_configs_that_cannot_be_run(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    build("minimax_m2", tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(ValueError, match=reason):
        load_config(tmp_path)
