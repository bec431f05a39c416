"""How the CUDA kernel of attention over coded tokens reads its codes, compiled for a CPU: every lane's copies, loads,
byte permutations and the dimensions it takes their bytes for, against the codecs."""

import ctypes
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compiled_source import CSRC, compiled

from shadowkv.kvcache.codecs.lloyd import LLOYD_ROWS
from shadowkv.ops.attend_coded import cuda
from shadowkv.ops.attend_selected.sources import DenseRows
from shadowkv.ops.case import Case
from shadowkv.ops.codec import CodecId

SOURCES = Path(__file__).parent / "coded_pages"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("pages")
    (folder / "attend_coded").mkdir()
    shutil.copy(CSRC / "kernels/attend_coded/codes.cuh", folder / "attend_coded")
    for source in SOURCES.iterdir():
        shutil.copy(source, folder)
    return compiled(folder / "pages.cpp")


@pytest.mark.parametrize("axis", ["keys", "values"])
@pytest.mark.parametrize("bits", [4, 3, 2])
def test_lanes_find_what_was_coded(library: ctypes.CDLL, bits: int, axis: str, seed: int) -> None:
    codec = LLOYD_ROWS[bits]
    codes, scale = codec.encode(torch.randn(64, 128), None)
    levels, step = cuda.level_bytes(codec, 128)
    found, found_scale = torch.empty(64, 128, dtype=torch.int8), torch.empty_like(scale)
    codes_at, scale_at, *found_at = (ctypes.c_void_p(x.data_ptr()) for x in (codes, scale, found, found_scale))
    library.decode(bits, axis == "keys", codes_at, scale_at, ctypes.c_uint64(levels & 2**64 - 1), *found_at)
    torch.testing.assert_close((2.0 * found + 1) * step * found_scale.float(), codec.decode(codes, scale, None, 128))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"value_codec": CodecId.LLOYD_2BIT, "centred": True, "rope_dim": 64}, None),
        ({"head_dim": 64}, "head dim 64 is not 128"),
        ({"key_codec": CodecId.DENSE}, "codec 0 of keys is not one of"),
        ({"value_codec": CodecId.ROTATED_3BIT}, "codec 2 of values is not one of"),
        ({"centred": True, "rope_dim": 20}, "20 dimensions rotate, no multiple of 8"),
    ],
)
def test_what_the_kernel_supports(changes: dict[str, int], reason: str | None) -> None:
    usual = Case(
        frozenset({"attend_coded"}), torch.bfloat16, 128, 32, 8, 128,
        key_codec=CodecId.LLOYD_4BIT, value_codec=CodecId.LLOYD_3BIT,
    )  # fmt: skip
    reasons = cuda.supports(replace(usual, **changes))
    assert (reasons == []) if reason is None else (len(reasons) == 1 and reason in reasons[0])


def test_other_rows_are_refused() -> None:
    rows = DenseRows(torch.zeros(1, 1, 64, 1, 128), torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="takes 128 dimensions in lloyd-4bit, -3bit or -2bit, not 128 in dense"):
        cuda.attend_coded(torch.zeros(1, 1, 128), rows, rows, *torch.zeros(2, 1, dtype=torch.int64))


@pytest.mark.parametrize("centred", [False, True])
def test_splits_fill_the_device_and_leave_every_warp_two_pages(centred: bool) -> None:
    for units, entries in ((8, 960), (8, 1952), (120, 960), (384, 300)):
        blocks = units * cuda.splits(units, entries, 132, centred)
        places = 132 * cuda.RESIDENT_BLOCKS[centred]
        assert 0.9 <= blocks / places / -(-blocks // places) <= 1
    assert cuda.splits(8, 64, 132, centred) == 32 // cuda.WARPS[centred]
    assert cuda.splits(8, 0, 132, centred) == cuda.splits(10000, 960, 132, centred) == 1
