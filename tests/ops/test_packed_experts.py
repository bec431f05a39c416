"""Packed matrices of experts, with a stand-in for the library that follows its contract in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise

import pytest
import torch
from test_codings import OTHERS
from test_quantized_blocks import random_blocks, rows_of
from test_quantized_groups import FORMS, random_rows
from torch import Tensor

from shadowkv.ops.grouped_quantized_matmul import humming as grouped
from shadowkv.ops.grouped_quantized_matmul import reference
from shadowkv.ops.quantized.blocks import BLOCKS
from shadowkv.ops.quantized.rows import QuantizedRows
from shadowkv.ops.quantized_matmul import humming
from shadowkv.ops.quantized_matmul import reference as dense
from tests.fake_humming import KERNELS, installed

if find_spec("humming") is not None:
    pytest.skip("the library is here: test_cuda_grouped_quantized.py", allow_module_level=True)

ALL = {**FORMS, **OTHERS}
COUNTS = [(3, 0, 5, 1), (0, 0, 0, 0), (0, 9, 0, 0), (0, 0, 0, 1), (40, 1, 0, 700)]


@pytest.fixture
def library() -> Iterator[None]:
    with installed():
        yield


def drawn(name: str, experts: int, rows: int, columns: int) -> QuantizedRows:
    if name in BLOCKS:
        blocks = random_blocks(name, experts * rows, columns)
        return rows_of(blocks, name)
    made = random_rows(ALL[name], experts * rows, columns, spikes=True)
    if name.startswith("fp8"):  # no NaN
        made.tensors[0].copy_((40 * torch.randn(made.tensors[0].shape)).clamp(-400, 400))
    return made


def offsets_of(counts: tuple[int, ...]) -> Tensor:
    return torch.tensor((0, *counts)).cumsum(0).int()


@pytest.mark.parametrize("columns", [256, 272])
@pytest.mark.parametrize("name", [*ALL, *BLOCKS])
def test_products_are_those_of_the_reference(seed: int, library: None, name: str, columns: int) -> None:
    """Experts of 24 rows, which are padded, and with 272 columns groups that are cut off."""
    if name in BLOCKS and columns % BLOCKS[name].values:
        pytest.skip("rows have whole blocks")
    rows = drawn(name, 4, 24, columns)
    packed = humming.pack_experts(rows, 4)
    assert (packed.experts, packed.rows, packed.columns) == (4, 24, columns)
    for counts in COUNTS:
        x, used = torch.randn(sum(counts) + 3, columns).bfloat16(), sum(counts)
        found = grouped.grouped_quantized_matmul(x, packed, offsets_of(counts))
        expected = reference.grouped_quantized_matmul(x.float(), [rows], offsets_of(counts))
        assert (found.shape, found.dtype) == ((used + 3, 24), torch.bfloat16)
        torch.testing.assert_close(
            found[:used].float(),
            expected[:used],
            rtol=2e-2,
            atol=1e-2 * float(expected[:used].abs().amax() if used else 1),
        )
        assert found[used:].isnan().all()


@pytest.mark.parametrize("same", [False, True])
def test_factors_of_experts_are_one_number_each_where_their_rows_have_the_same(
    seed: int, library: None, same: bool
) -> None:
    rows = drawn("nvfp4", 4, 24, 64)
    if same:
        rows.tensors[-1].copy_(torch.tensor([1.0, 2.0, -3.0, 0.5]).repeat_interleave(24).unsqueeze(1))
    packed = humming.pack_experts(rows, 4)
    assert packed.tensors["weight_scale_2"].shape == ((4,) if same else (4, 128))
    x, offsets = torch.randn(8, 64).bfloat16(), offsets_of((2, 2, 2, 2))
    found = grouped.grouped_quantized_matmul(x, packed, offsets)
    expected = reference.grouped_quantized_matmul(x.float(), [rows], offsets)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=1e-2 * float(expected.abs().amax()))


def test_sizes_of_gpt_oss_are_padded_little(seed: int, library: None) -> None:
    """2,880 columns are not, of 2,880 rows there are 64 more; groups of 128 are whole."""
    packed = humming.pack_experts(drawn("mxfp4", 2, 2880, 2880), 2)
    assert packed.tensors["weight"].shape == (2, 2944, 2880 * 4 // 32)
    packed = humming.pack_experts(drawn("int4, zero points", 2, 8, 2880), 2)
    assert packed.tensors["weight"].shape == (2, 128, 2944 * 4 // 32)


def test_kernels_are_compiled_for_rows_of_all_experts(seed: int, library: None) -> None:
    """From one row on each number of rows has one, which is tuned for no fewer; all are loaded before a graph is."""
    experts, rows = humming.pack_experts(drawn("int4", 4, 8, 64), 4), humming.pack_rows(drawn("int4", 1, 8, 64))
    humming.compile_kernels([experts, experts, rows])
    tuned = sorted(tokens for fields, tokens in KERNELS if fields["num_experts"])
    assert tuned == [8, 32, 64, 128, 256, 512, 1024]
    assert sorted(tokens for fields, tokens in KERNELS if not fields["num_experts"]) == [*humming.BATCHES, humming.MANY]
    entries = humming._kernels(experts.layer, 0, 4).view(-1, 4).tolist()
    assert [(low, high) for low, high, *_ in entries] == [
        *((0, 8), (8, 32), (32, 64), (64, 128), (128, 256), (256, 512), (512, 1 << 30)),
    ]
    assert [KERNELS[number][1] for _, _, number, _ in entries] == tuned


def test_kernels_of_a_rank_are_tuned_for_its_part_of_all_rows(seed: int, library: None) -> None:
    """A rank with two experts of eight expects a quarter of the rows; all rows choose the kernel."""
    experts = humming.pack_experts(drawn("int4", 2, 8, 64), 2, 8)
    humming.compile_kernels([experts])
    assert sorted(tokens for _, tokens in KERNELS) == [8, 16, 32, 64, 128, 256, 512]
    entries = humming._kernels(experts.layer, 0, 8).view(-1, 4).tolist()
    bounds = [0, 8, 16, 64, 128, 256, 512, 1024, 1 << 30]
    assert [(low, high) for low, high, *_ in entries] == list(pairwise(bounds))
    assert [KERNELS[number][1] for _, _, number, _ in entries] == [8, 8, 16, 32, 64, 128, 256, 512]


def test_what_it_does_not_take_is_refused(seed: int, library: None) -> None:
    packed = humming.pack_experts(drawn("int4", 4, 24, 64), 4)
    offsets = offsets_of((1, 0, 0, 0))
    with pytest.raises(ValueError, match="K = 64 and bfloat16"):
        grouped.grouped_quantized_matmul(torch.zeros(1, 64), packed, offsets)
    for bad in (offsets[1:], offsets.long()):
        with pytest.raises(ValueError, match="4 experts need 5 offsets in int32"):
            grouped.grouped_quantized_matmul(torch.zeros(1, 64).bfloat16(), packed, bad)
    with pytest.raises(ValueError, match="multiples of 8, not 20 x 64"):
        humming.pack_experts(drawn("int4", 4, 20, 64), 4)
    assert grouped.grouped_quantized_matmul(torch.zeros(0, 64).bfloat16(), packed, 0 * offsets).shape == (0, 24)


def test_the_loop_takes_runs_that_begin_within_an_expert(seed: int) -> None:
    """Gates in one form, what they are multiplied with in another, and one expert's in plain numbers."""
    row_blocks: list[Tensor | QuantizedRows] = []
    for expert in range(3):
        row_blocks += [
            random_rows(FORMS["int4"], 4, 64),
            random_rows(FORMS["int8"], 4, 64) if expert else torch.randn(4, 64),
        ]
    x, offsets = torch.randn(7, 64), offsets_of((2, 0, 5))
    dense = [block if isinstance(block, Tensor) else block.form.unpack(block.tensors) for block in row_blocks]
    whole = torch.cat(dense).view(3, 8, 64)
    found = reference.grouped_quantized_matmul(x, row_blocks, offsets)
    torch.testing.assert_close(found, torch.cat((x[:2] @ whole[0].T, x[2:] @ whole[2].T)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["nvfp4", "int4, zero points"])
@pytest.mark.parametrize("numbers", [5 * 64, 3 * 24 * 64])
def test_packing_a_part_at_a_time(
    seed: int, library: None, name: str, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five rows of an expert, or three experts of four."""
    rows = drawn(name, 4, 24, 64)
    whole = humming.pack_experts(rows, 4)
    monkeypatch.setattr(humming, "NUMBERS_AT_ONCE", numbers)
    parts = humming.pack_experts(rows, 4)
    assert parts.layer == whole.layer and parts.tensors.keys() == whole.tensors.keys()
    for part, tensor in zip(parts.tensors.values(), whole.tensors.values(), strict=True):
        assert part.dtype == tensor.dtype and torch.equal(part.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("name", [*ALL, "Q4_K", "Q6_K"])
def test_rows_of_one_matrix_are_packed_alike(seed: int, library: None, name: str) -> None:
    rows = drawn(name, 1, 24, 256)
    if name == "nvfp4":
        rows.tensors[-1].fill_(0.5)
    x = torch.randn(9, 256).bfloat16()
    found = humming.quantized_matmul(x, humming.pack_rows(rows))
    expected = dense.quantized_matmul(x.float(), rows)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=1e-2 * float(expected.abs().amax()))
