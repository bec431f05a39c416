"""Mixtures of experts: how tokens choose, every way in which files have experts, ranks, and what is refused."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_files import edit_json, edit_tensors
from dense_cache import packed_logits
from families import CASES, TINY, build, load_oracle, oracle_logits
from gguf_files import write_model
from precision import InFloat64, assert_close_in_blocks, assert_close_like_lowp, draws
from quantized_files import write_quantized
from test_families import assert_same, sequences
from thread_group import on_ranks

from shadowkv.engine.startup.sizing import block_bytes
from shadowkv.layers.group import Group
from shadowkv.layers.moe import MixtureOfExperts, RoutedExperts
from shadowkv.layers.quantized_matrix import QuantizedMatrix
from shadowkv.models import Decoder, load_config, load_model, loader
from shadowkv.models.checkpoints.safetensors_weights import SafetensorsWeights
from shadowkv.models.loader import load_plan
from shadowkv.models.sharding import Shard
from shadowkv.models.storage import on_gpus, planned_row_blocks
from shadowkv.ops.choose_experts.reference import choose_experts
from shadowkv.ops.choose_experts.routing import Routing
from shadowkv.ops.quantized.blocks import BLOCKS
from shadowkv.ops.registry import Ops
from tests.allocations import peak_bytes

FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe")
MORE_THAN_EXPERTS = ("qwen3_moe-some-dense", "qwen3_5_moe", "qwen3_next", "qwen4_exp", "minimax_m3", "gemma4-all")
"""Families whose other layers have tests of their own, also on ranks."""
WIDE = {"hidden_size": 256, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "head_dim": 64}


def log(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers]).log()


def test_softmax_normalised_or_not() -> None:
    logits = log(0.1, 0.4, 0.2, 0.3)
    weights, experts = choose_experts(logits, None, Routing(4, 2, normalised=False))
    assert experts.tolist() == [[1, 3]]
    torch.testing.assert_close(weights, torch.tensor([[0.4, 0.3]]))
    weights, _ = choose_experts(logits, None, Routing(4, 2, scale=2.0))
    torch.testing.assert_close(weights, torch.tensor([[8 / 7, 6 / 7]]))


def test_sigmoids_are_corrected_where_they_choose_and_not_as_weights() -> None:
    scores = torch.tensor([[0.2, 0.6, 0.4, 0.5]])
    routing = Routing(4, 2, scores="sigmoid", normalised=False, corrected=True)
    weights, experts = choose_experts(scores.logit(), torch.tensor([0.7, 0.0, 0.0, -0.2]), routing)
    assert experts.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[0.2, 0.6]]))


def test_a_token_stays_within_its_best_groups() -> None:
    """Sums of groups' two best are 1.02, 1.11 and 0.9; the best expert of all is in the last group."""
    scores = torch.tensor([[0.52, 0.5, 0.1, 0.6, 0.51, 0.4, 0.85, 0.05, 0.02]])
    routing = Routing(9, 3, scores="sigmoid", normalised=False, groups=3, groups_per_token=2)
    assert choose_experts(scores.logit(), None, routing)[1].tolist() == [[3, 0, 4]]


def test_scores_of_zero_have_weights() -> None:
    weights, _ = choose_experts(torch.full((1, 4), -1e4), None, Routing(4, 2, scores="sigmoid"))
    assert torch.equal(weights, torch.zeros(1, 2))


def test_the_share_of_experts_that_tokens_touch() -> None:
    routing = Routing(128, 8)
    assert routing.share_touched(1) == pytest.approx(8 / 128)
    assert routing.share_touched(2) == pytest.approx(1 - (15 / 16) ** 2)
    assert Routing(8, 8).share_touched(1) == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_joined_experts(name: str, tmp_path: Path) -> None:
    """As transformers saves them where it is told to: matrices of all experts in one tensor."""
    oracle = build(name, tmp_path, save_original_format=False)
    assert any(name.endswith(".experts.gate_up_proj") for name, _ in oracle.named_parameters())
    loaded = load_model(tmp_path)
    assert loaded.notes == ()
    assert_same(packed_logits(loaded.model, sequences()), oracle_logits(oracle, sequences()))


IN_GGUF = [name for name in CASES if name.startswith(FAMILIES) and "dense" not in name and "window" not in name]
"""Windows of these families no GGUF file has."""


@pytest.mark.parametrize("name", IN_GGUF)
def test_gguf(name: str, tmp_path: Path) -> None:
    oracle = build(name, tmp_path, {"norm_topk_prob": True} if name.startswith("qwen3") else {})
    assert_same(
        packed_logits(load_model(write_model(tmp_path / "model.gguf", oracle)).model, sequences()),
        oracle_logits(oracle, sequences()),
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_gguf_in_blocks(name: str, tmp_path: Path) -> None:
    """Experts stay in the file's blocks on a CPU; the first layer's down projections have another format."""
    oracle = build(name, tmp_path, {**WIDE, "intermediate_size": 256})
    kinds = {"ffn_gate_exps": "Q4_0", "ffn_up_exps": "Q8_0", "ffn_down_exps": "Q6_K", "ffn_gate_shexp": "Q4_0"}
    blocks, plain = (
        load_model(write_model(tmp_path / f"{as_numbers}.gguf", oracle, kinds=kinds, plain=as_numbers))
        for as_numbers in (False, True)
    )
    experts = blocks.model.layers[1].mlp.experts
    assert isinstance(experts.gate_up.weight, QuantizedMatrix) and isinstance(experts.down.weight, QuantizedMatrix)
    assert {block.form for block in experts.gate_up.weight.row_blocks} == {BLOCKS["Q4_0"], BLOCKS["Q8_0"]}
    config, forms = load_plan(tmp_path / "False.gguf")
    row_blocks = planned_row_blocks(Shard(config), forms, torch.float32)
    assert Decoder(config, torch.float32, "meta", row_blocks).num_bytes == blocks.model.num_bytes
    # On a GPU gates and what they are multiplied with have one form; all of these have in down projections.
    kept = on_gpus(forms, config, torch.bfloat16)
    of_experts = {name.rpartition(".experts.")[2].partition(".")[2] for name in kept if ".experts." in name}
    assert of_experts == {"down_proj.weight"}
    assert blocks.model.num_parameters == plain.model.num_parameters
    exact = partial(packed_logits, plain.model, sequences())
    assert_close_in_blocks(packed_logits(blocks.model, sequences()), exact)

    def part(group: Group) -> tuple[RoutedExperts, list[torch.Tensor]]:
        loaded = load_model(tmp_path / "False.gguf", group=group, expert_parallel=True)
        return loaded.model.layers[1].mlp.experts, packed_logits(loaded.model, sequences())

    for of_rank, found in on_ranks(2, part):
        assert_close_in_blocks(found, exact)
        for projection in ("gate_up", "down"):  # blocks of 256 columns cannot be cut at 128
            mine, whole = getattr(of_rank, projection).weight, getattr(experts, projection).weight
            assert mine.nbytes == whole.nbytes / 2


@pytest.mark.parametrize("kind", ["awq", "gptq", "int4", "fp8, Qwen3's blocks", "nvfp4"])
@pytest.mark.parametrize("case", ["qwen3_moe", "glm4_moe"])
def test_quantized_checkpoints(kind: str, case: str, tmp_path: Path) -> None:
    files, plain = write_quantized(tmp_path, kind, case, **WIDE)
    ours, theirs = load_model(files), load_model(plain)
    assert isinstance(ours.model.layers[1].mlp.experts.gate_up.weight, QuantizedMatrix)
    assert ours.model.num_bytes < 0.5 * theirs.model.num_bytes
    with InFloat64():
        exact = torch.cat(oracle_logits(load_oracle(plain, torch.float64), sequences()))
    oracle = load_oracle(plain, torch.float32)
    lowp = draws(lambda: torch.cat(oracle_logits(oracle, sequences())))
    found = [packed_logits(ours.model, sequences())]
    for expert_parallel in (False, True):

        def part(group: Group, whole: bool = expert_parallel) -> list[torch.Tensor]:
            return packed_logits(load_model(files, group=group, expert_parallel=whole).model, sequences())

        found += on_ranks(2, part)
    for logits in found:
        assert_close_like_lowp(torch.cat(logits), exact, *lowp)


def test_experts_stay_as_they_are_beside_products_in_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "unfit", lambda device, dtype: None)  # the references stand in for hardware
    files, plain = write_quantized(tmp_path, "fp8, Qwen3's blocks", "qwen3_moe", **WIDE)
    ours, theirs = load_model(files, dtype="bfloat16"), load_model(plain, dtype="bfloat16")
    assert ours.config.quantization == "fp8"
    assert ours.model.weights_description == "bfloat16, fp8 weights, those of experts in fp8-g128"
    assert not any("dequantized" in note for note in ours.notes)
    config, forms = load_plan(files)
    assert config.quantization == "fp8" and forms and all(".experts." in name for name in forms)
    planned = Decoder(config, torch.bfloat16, "meta", planned_row_blocks(Shard(config), forms, torch.bfloat16))
    assert planned.num_bytes == ours.model.num_bytes
    one_of = [one.model.layers[1].mlp.experts for one in (ours, theirs)]
    for one in (ours, theirs):
        one.model.use(Ops())
    x = torch.randn(9, WIDE["hidden_size"]).bfloat16()
    weights, chosen = torch.rand(9, 8).topk(3)
    mine, other = (experts(x, weights, chosen) for experts in one_of)
    torch.testing.assert_close(mine, other, rtol=0, atol=2e-2 * float(other.abs().amax()))


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "glm4_moe", "mixtral", "gpt_oss", "minimax_m2-all-rotates"])
def test_ranks_give_the_logits_of_the_whole(name: str, size: int, expert_parallel: bool, tmp_path: Path) -> None:
    """Inner widths of 48 are cut at 32, and 16 and 32; 8 experts at 4, or at 3 and 6; 4 experts at 2, or 2 and 3."""
    sizes = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 80}
    of_mlp = name.startswith(("mixtral", "gpt", "minimax"))
    oracle = build(name, tmp_path, {"intermediate_size": 48} if of_mlp else sizes)

    def part(group: Group) -> tuple[int, list[torch.Tensor]]:
        loaded = load_model(tmp_path, group=group, expert_parallel=expert_parallel)
        experts = loaded.model.layers[1].mlp.experts
        return experts.gate_up.weight.numel(), packed_logits(loaded.model, sequences())

    parts = on_ranks(size, part)
    assert sum(count for count, _ in parts) == (4 if name == "mixtral" else 8) * 2 * 48 * TINY["hidden_size"]
    for _, found in parts:
        assert_same(found, oracle_logits(oracle, sequences()))


@pytest.mark.parametrize("name", [*MORE_THAN_EXPERTS, "nemotron_h-experts"])
def test_whole_experts_beside_other_layers(name: str, tmp_path: Path) -> None:
    oracle = build(name, tmp_path)
    with InFloat64():
        exact = torch.cat(oracle_logits(load_oracle(tmp_path, torch.float64), sequences()))
    lowp = draws(lambda: torch.cat(oracle_logits(oracle, sequences())))

    def part(group: Group) -> list[torch.Tensor]:
        return packed_logits(load_model(tmp_path, group=group, expert_parallel=True).model, sequences())

    for found in on_ranks(2, part):
        assert_close_like_lowp(torch.cat(found), exact, *lowp)


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_kernels_are_told_which_rows_are_other_ranks(expert_parallel: bool, tmp_path: Path) -> None:
    build("qwen3_moe", tmp_path)
    model = load_model(tmp_path, group=Group(1, 2), expert_parallel=expert_parallel).model
    ops, told = Ops(), []
    multiply, gate = ops.grouped_matmul, ops.gated_activation
    ops.grouped_matmul = lambda x, weight, offsets, total: told.append(total) or multiply(x, weight, offsets)
    ops.gated_activation = lambda x, kind, offsets: told.append(offsets) or gate(x, kind)
    model.use(ops)
    chosen = torch.tensor([[0, 5], [5, 7], [1, 2]])  # the last four of eight are on this rank
    model.layers[1].mlp.experts(torch.randn(3, TINY["hidden_size"]), torch.ones(3, 2), chosen)
    before, offsets, after = told
    assert before == after == 8
    assert (offsets.tolist() == [0, 0, 2, 2, 3]) if expert_parallel else offsets is None


def test_whole_experts_of_other_ranks_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From files that have each expert by itself; ranks with a part of every expert read all of them."""
    build("qwen3_moe", tmp_path)
    read, taken = SafetensorsWeights.read, list[str]()
    monkeypatch.setattr(
        SafetensorsWeights, "read", lambda self, name, *rest: taken.append(name) or read(self, name, *rest)
    )

    def experts(expert_parallel: bool) -> set[str]:
        taken.clear()
        load_model(tmp_path, group=Group(2, 3), expert_parallel=expert_parallel)
        assert "model.layers.1.mlp.gate.weight" in taken and len(taken) == len({*taken})
        return {found[1] for name in taken if (found := re.search(r"\.experts\.(\d+)\.", name))}

    assert experts(True) == {"6", "7"}
    build("qwen3_moe", tmp_path, {"moe_intermediate_size": 48})
    assert experts(False) == {*"01234567"}


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_number_is_on_the_rank_that_uses_it(size: int, expert_parallel: bool, tmp_path: Path) -> None:
    build("qwen2_moe", tmp_path, {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 96})
    edit_json(tmp_path / "config.json", num_attention_heads=6, intermediate_size=160)
    shards = [Shard(load_config(tmp_path), rank, size, expert_parallel) for rank in range(size)]
    for name, rows, columns in (
        ("mlp.experts.gate_up.weight", 8 * 192, 48),
        ("mlp.experts.down.weight", 8 * 48, 96),
        ("mlp.shared.gate_up.weight", 192, 48),
        ("mlp.shared.down.weight", 48, 96),
    ):
        whole = torch.arange(rows * columns).reshape(rows, columns)
        seen = []
        for shard in shards:
            experts = shard.config.experts
            assert experts is not None
            here = sum(
                part.numel()
                for start in range(0, rows, 24)
                for _, part in shard.pieces(f"layers.1.{name}", start, start + 24, whole[start : start + 24])
            )
            inner = experts.shared_size if "shared" in name else experts.intermediate_size
            count = 1 if "shared" in name else experts.here[1] - experts.here[0]
            assert here == count * inner * 48 * (2 if "gate_up" in name else 1)
            seen += [part.flatten() for _, part in shard.pieces(f"layers.1.{name}", 0, rows, whole)]
        assert torch.equal(torch.cat(seen).sort().values, whole.flatten())


def test_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    build("qwen3_moe", tmp_path, {"moe_intermediate_size": 32})
    with pytest.raises(ValueError, match="tensor_parallel_size=3 is too much for the experts' intermediate_size=32"):
        load_model(tmp_path, group=Group(2, 3))
    edit_json(tmp_path / "config.json", num_attention_heads=16, head_dim=16)
    with pytest.raises(ValueError, match="tensor_parallel_size=9 is more than the 8 experts of a layer"):
        Shard(load_config(tmp_path), 8, 9, expert_parallel=True)
    build("llama", tmp_path / "dense")
    with pytest.raises(ValueError, match="enable_expert_parallel: llama models have no experts; leave it out"):
        load_model(tmp_path / "dense", expert_parallel=True)


def test_layers_that_draft_tokens_are_left_out_and_said(tmp_path: Path) -> None:
    oracle = build("glm4_moe", tmp_path)
    last, drafting = f"model.layers.{oracle.config.num_hidden_layers}", torch.zeros(48)
    edit_tensors(
        tmp_path / "model.safetensors", **{f"{last}.{name}.weight": drafting.clone() for name in ("enorm", "eh_proj")}
    )
    loaded = load_model(tmp_path)
    assert loaded.notes == (f"2 weights of layers that draft tokens are not used: {last}.eh_proj.weight, ...",)
    file = tmp_path / "model.gguf"
    write_model(file, oracle, {"blk.3.nextn.enorm.weight": drafting}, block_count=4, nextn_predict_layers=1)
    loaded = load_model(file)
    assert loaded.config.num_layers == 3
    assert_same(packed_logits(loaded.model, sequences()), oracle_logits(oracle, sequences()))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_experts_per_tok": 9}, "experts per token=9 is not a number from 1 to 8"),
        ({"num_local_experts": None}, "num_experts is missing"),
        ({"num_local_experts": 2.5}, "num_local_experts=2.5 is not a whole number"),
        (
            {"moe_intermediate_size": 36},
            "experts need sizes that are multiples of 8, and experts' intermediate_size is",
        ),
        ({"num_local_experts": 512, "num_hidden_layers": 200}, "102400 experts in all layers are more than 65536"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob=yes is not true or false"),
        ({"mlp_only_layers": [0.5]}, r"mlp_only_layers=\[0.5\] is not a list of layers"),
    ],
)
def test_configs_that_make_no_sense(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    build("qwen3_moe", tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(ValueError, match=reason):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n_group": 3}, "8 experts cannot be divided into 3 equal groups of two or more"),
        ({"n_group": 4, "topk_group": 5}, "groups per token=5 is not a number from 1 to 4"),
        ({"n_group": 4, "topk_group": 1}, "3 experts per token are more than 1 groups have"),
        ({"routed_scaling_factor": "much"}, "routed_scaling_factor=much is not a number above 0"),
    ],
)
def test_groups_that_make_no_sense(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    build("glm4_moe", tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(ValueError, match=reason):
        load_config(tmp_path)


def test_experts_that_are_missing_or_too_many_are_named(tmp_path: Path) -> None:
    build("qwen3_moe", tmp_path, save_original_format=False)
    edit_json(tmp_path / "config.json", num_local_experts=7)
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.0\.mlp\.experts\.down_proj \(8, 48, 32\)"):
        load_model(tmp_path)
    build("qwen3_moe", tmp_path)
    edit_json(tmp_path / "config.json", num_local_experts=9)
    with pytest.raises(ValueError, match=r"missing: model\.layers\.0\.mlp\.experts\.8\.gate_proj\.weight"):
        load_model(tmp_path)


def test_an_expert_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    build("qwen3_moe", tmp_path)
    edit_tensors(tmp_path / "model.safetensors", **{"model.layers.0.mlp.experts.down_proj": torch.zeros(8, 48, 32)})
    with pytest.raises(
        ValueError, match=r"experts\.0\.down_proj\.weight occurs twice, also as .*down_proj.*; fetch it again"
    ):
        load_model(tmp_path)


def test_the_name_that_a_model_was_released_with_for_its_experts(tmp_path: Path) -> None:
    build("qwen3_moe", tmp_path)
    config = load_config(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    fields["num_experts"] = fields.pop("num_local_experts")
    file.write_text(json.dumps(fields))
    assert load_config(tmp_path) == config


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("sizes", [(64, 512), (512, 64), (256, 256)])
def test_what_is_left_for_a_block_is_what_its_experts_take(sizes: tuple[int, int], name: str, tmp_path: Path) -> None:
    """A block's rows as they go through 64 experts, besides its own and what it adds."""
    hidden, inner = sizes
    width = "intermediate_size" if name == "gpt_oss" else "moe_intermediate_size"
    wide = {"hidden_size": hidden, width: inner, "num_experts": 64, "num_experts_per_tok": 4}
    build(name, tmp_path, {**wide, "num_local_experts": 64})
    model = load_model(tmp_path, load_format="dummy").model
    ops = Ops()
    ops.gated_activation = lambda gate_up, *_: gate_up.chunk(2, -1)[
        0
    ].clone()  # as little memory as a GPU's kernel takes
    model.use(ops)
    x = torch.randn(2048, hidden)
    taken, left = peak_bytes(lambda: model.layers[1].mlp(x)), block_bytes(model.config, len(x), torch.float32)
    assert taken <= left <= 1.5 * taken + 5 * x.nbytes


@pytest.mark.parametrize("name", ["qwen2_moe", "glm4_moe", "gpt_oss"])
def test_no_tokens_and_few(name: str, tmp_path: Path) -> None:
    """A token's result does not depend on what else is in the batch, and that may be nothing."""
    build(name, tmp_path)
    model = load_model(tmp_path).model
    model.use(Ops())
    mlp, x = model.layers[1].mlp, torch.randn(9, TINY["hidden_size"], generator=torch.Generator().manual_seed(0))
    assert mlp(x[:0]).shape == (0, TINY["hidden_size"])
    torch.testing.assert_close(torch.cat([mlp(row) for row in x.split(1)]), mlp(x))
    low = load_model(tmp_path, dtype="bfloat16").model
    low.use(Ops())
    assert low.layers[1].mlp(x.bfloat16()).dtype == torch.bfloat16


def test_dummy_weights_route_to_all_experts(tmp_path: Path) -> None:
    build("glm4_moe", tmp_path)
    model = load_model(tmp_path, load_format="dummy").model
    model.use(Ops())
    mixture = model.layers[1].mlp
    assert isinstance(mixture, MixtureOfExperts)
    x = torch.randn(500, TINY["hidden_size"], generator=torch.Generator().manual_seed(0))
    _, experts = mixture.router(x)
    assert experts.flatten().bincount(minlength=8).min() > 50
    assert all(logits.isfinite().all() for logits in packed_logits(model, sequences()))
