"""Weights that stay in a GGUF file's blocks: answers as of the numbers that they stand for, memory as of the file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_cache import packed_logits
from families import build
from gguf_files import write_model
from precision import assert_close_in_blocks
from test_adapter import write_adapter
from test_families import sequences
from thread_group import on_ranks

from shadowkv.layers.quantized_matrix import QuantizedLinear, QuantizedMatrix, RowBlock
from shadowkv.models import LoadedModel, load_model, loader, storage
from shadowkv.ops.extension import cpu_missing
from shadowkv.ops.quantized.blocks import BLOCKS
from shadowkv.ops.registry import choose

pytestmark = pytest.mark.skipif(bool(cpu_missing()), reason="weights stay in blocks where the C++ extension is built")

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
ALL_ALIKE = {kind: dict.fromkeys((*PROJECTIONS, "token_embd", "output"), kind) for kind in ("Q4_0", "Q4_1", "Q8_0")}
MIXED = {
    # As llama.cpp's Q4_K_M has them, with one more that is dequantized.
    "Q4_K_M": {
        **dict.fromkeys(PROJECTIONS, "Q4_K"),
        **dict.fromkeys(("attn_v", "ffn_down", "token_embd", "output"), "Q6_K"),
        "attn_output": "Q5_0",
    },
    "part": {"attn_q": "Q4_0", "attn_v": "Q8_0", "ffn_up": "Q4_1"},
}


def write(folder: Path, case: str, kinds: dict[str, str]) -> tuple[Path, Path]:
    """A file with quantized tensors, and one with the numbers that they stand for."""
    model = build(case, folder, SIZES)
    return (
        write_model(folder / "blocks.gguf", model, kinds=kinds),
        write_model(folder / "plain.gguf", model, kinds=kinds, plain=True),
    )


def assert_same_logits(ours: LoadedModel, theirs: LoadedModel) -> None:
    for lengths in ((9, 1, 2), (9, 1, 5), (150,)):  # few tokens, more, and more than are multiplied at once
        tokens = sequences(lengths)
        assert_close_in_blocks(packed_logits(ours.model, tokens), partial(packed_logits, theirs.model, tokens))


@pytest.mark.parametrize(
    ("case", "kinds", "words"),
    [
        ("llama", ALL_ALIKE["Q4_0"], "Q4_0"),
        ("qwen2", ALL_ALIKE["Q4_1"], "Q4_1"),  # with biases
        ("llama-tied", ALL_ALIKE["Q8_0"], "Q8_0"),
        ("llama", MIXED["Q4_K_M"], "Q4_K and Q6_K"),
        ("phi3", MIXED["Q4_K_M"] | {"attn_qkv": "Q4_K"}, "Q4_K and Q6_K"),  # joined in the file
        ("qwen3", MIXED["part"], "Q4_0 and Q4_1 and Q8_0"),
    ],
)
def test_same_logits(case: str, kinds: dict[str, str], words: str, tmp_path: Path) -> None:
    blocks, plain = write(tmp_path, case, kinds)
    ours, theirs = load_model(blocks), load_model(plain)
    assert ours.model.weights_description == f"float32, {words} weights"
    assert ours.model.num_parameters == theirs.model.num_parameters
    assert_same_logits(ours, theirs)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kinds", ["Q4_0", "Q4_K_M"])
def test_ranks_keep_the_blocks_that_they_do_not_cut(kinds: str, size: int, tmp_path: Path) -> None:
    """The MLP's 512 columns are cut at 256, or at 160 and 336; heads at their 64 columns."""
    blocks, plain = write(tmp_path, "llama", ALL_ALIKE[kinds] if kinds in ALL_ALIKE else MIXED[kinds])
    expected = partial(packed_logits, load_model(plain).model, sequences())
    ranks = on_ranks(size, lambda group: load_model(blocks, group=group))
    found = on_ranks(size, lambda group: packed_logits(load_model(blocks, group=group).model, sequences()))
    for rank, logits in zip(ranks, found, strict=True):
        assert_close_in_blocks(logits, expected)
        assert isinstance(rank.model.layers[1].attention.qkv, QuantizedLinear)
        assert isinstance(rank.model.head, torch.nn.Parameter)
        inner, block = rank.shard.inner, 32 if kinds == "Q4_0" else 256
        whole = all(border % block == 0 for border in inner)
        assert isinstance(rank.model.layers[1].mlp.down, QuantizedLinear) == whole


def test_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    blocks, plain = write(tmp_path, "llama", MIXED["Q4_K_M"])
    kept, dense = load_model(blocks).model, load_model(plain).model
    sizes = {"Q4_K": 144 / 256, "Q6_K": 210 / 256}
    for layer in kept.layers:
        assert isinstance(layer.attention.out, torch.nn.Module) and not isinstance(layer.attention.out, QuantizedLinear)
        assert [block.form for block in layer.attention.qkv.weight.row_blocks] == [BLOCKS["Q4_K"], BLOCKS["Q6_K"]]
        assert layer.attention.qkv.weight.row_blocks[0].rows == 512  # q and k in one product
        assert layer.mlp.down.weight.nbytes == sizes["Q6_K"] * 256 * 512
    saved = sum(4 * m.num_values - m.nbytes for m in kept.modules() if isinstance(m, QuantizedMatrix))
    assert kept.num_bytes == dense.num_bytes - saved < dense.num_bytes / 2


def test_memory_is_counted_in_blocks_before_any_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, _ = write(tmp_path, "llama", ALL_ALIKE["Q8_0"])
    need = load_model(blocks).model.num_bytes
    monkeypatch.setattr(loader, "free_bytes", lambda device: need)
    load_model(blocks)
    monkeypatch.setattr(loader, "free_bytes", lambda device: need - 1)

    def fail(*_: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(loader, "fill", fail)
    with pytest.raises(MemoryError, match=r"as float32, Q8_0 weights on cpu, .*; pass dtype='bfloat16', use a smaller"):
        load_model(blocks)  # its norms would halve
    monkeypatch.setattr(loader, "free_bytes", lambda device: need // 2)
    with pytest.raises(MemoryError, match="free; use a smaller model"):
        load_model(blocks)


def test_blocks_are_dequantized_where_that_is_asked_for(tmp_path: Path) -> None:
    blocks, plain = write(tmp_path, "llama", ALL_ALIKE["Q4_0"])
    ours, theirs = load_model(blocks, quantization="none"), load_model(plain)
    assert ours.model.forms == []
    for name, parameter in theirs.model.named_parameters():
        assert torch.equal(ours.model.get_parameter(name), parameter)
    assert ours.notes[-1].endswith(": quantization='none'")


def dequantized_without_cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(storage, "choose", lambda name, device: choose(name, device, override="reference"))
    return {}


def dequantized_as_fp8(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr("shadowkv.models.loader.unfit", lambda device, dtype: None)
    return {"quantization": "fp8", "dtype": "bfloat16"}


@pytest.mark.parametrize("how", [dequantized_without_cpu_kernels, dequantized_as_fp8])
def test_where_products_are_of_plain_numbers(
    how: Callable[[pytest.MonkeyPatch], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = how(monkeypatch)
    blocks, plain = (load_model(file, **options).model for file in write(tmp_path, "llama", MIXED["Q4_K_M"]))
    assert not blocks.forms
    for name, parameter in plain.named_parameters():
        mine = blocks.get_parameter(name)
        assert mine.dtype == parameter.dtype and torch.equal(mine.float(), parameter.float()), name


def test_what_an_adapter_changes_is_dequantized_and_said(tmp_path: Path) -> None:
    blocks, plain = write(tmp_path, "llama", ALL_ALIKE["Q4_0"])
    module = "model.layers.1.self_attn.k_proj"
    sides = {"A": torch.randn(4, 256), "B": 0.1 * torch.randn(256, 4)}
    pairs = {f"base_model.model.{module}.lora_{side}.weight": matrix for side, matrix in sides.items()}
    adapter = write_adapter(tmp_path / "adapter", pairs)
    ours, theirs = load_model(blocks, adapter=adapter), load_model(plain, adapter=adapter)
    assert ours.notes == (f"1 weights that the adapter changes are dequantized: {module}.weight, ...",)
    q4_0 = BLOCKS["Q4_0"]
    assert ours.model.layers[1].attention.qkv.weight.row_blocks == (
        RowBlock(256, q4_0),
        RowBlock(256, None),
        RowBlock(256, q4_0),
    )
    assert_same_logits(ours, theirs)


def test_a_flag_that_names_another_form_is_refused(tmp_path: Path) -> None:
    blocks, _ = write(tmp_path, "llama", ALL_ALIKE["Q4_0"])
    with pytest.raises(ValueError, match=r"quantization='awq': the files of .* are in GGUF and are loaded as they are"):
        load_model(blocks, quantization="awq")
