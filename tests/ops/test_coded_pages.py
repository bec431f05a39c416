"""Decoding in the CUDA kernel of attention over coded tokens, compiled for a CPU, against the codecs: every lane's
copies, loads and byte permutations, and the dimensions of its bytes."""

import ctypes
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compiled_source import CSRC, compiled
from torch import Tensor

from shadowkv.kvcache.codecs import ROW_CODECS
from shadowkv.kvcache.codecs.lloyd import LloydRows
from shadowkv.ops.attend_coded import cuda
from shadowkv.ops.attend_selected.sources import DenseRows
from shadowkv.ops.case import Case
from shadowkv.ops.codec import CodecId, RowCodec

SOURCES = Path(__file__).parent / "coded_pages"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("pages")
    shutil.copytree(SOURCES, folder, dirs_exist_ok=True)
    shutil.copytree(CSRC / "kernels/attend_coded", folder / "kernels/attend_coded")
    shutil.copy(SOURCES.parent / "cuda_on_cpu/permute.h", folder)
    return compiled(folder / "pages.cpp", f"-I{folder}")


def decoded(library: ctypes.CDLL, codec: RowCodec, axis: str, codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes int8 [64, 128] of a page as lanes decode them, and the scales as they read them."""
    found = torch.full((64, 128), 77, dtype=torch.int8)
    numbers = torch.full_like(scale, torch.nan) if scale.numel() else torch.full((64, 4), torch.nan).half()
    codes_at, scale_at, *found_at = (ctypes.c_void_p(x.data_ptr()) for x in (codes, scale, found, numbers))
    levels = ctypes.c_uint64(cuda.level_bytes(codec)[0] & 2**64 - 1)
    library.decode(ctypes.c_int64(codec.id), axis == "keys", codes_at, scale_at, levels, *found_at)
    return found, numbers.float()


@pytest.mark.parametrize("axis", ["keys", "values"])
@pytest.mark.parametrize("name", ["lloyd-4bit", "lloyd-3bit", "lloyd-2bit", "polar-int4"])
def test_lanes_find_what_was_coded(library: ctypes.CDLL, name: str, axis: str, seed: int) -> None:
    codec = ROW_CODECS[name]
    codes, scale = codec.encode(torch.randn(64, 128), None)
    found, found_scale = decoded(library, codec, axis, codes, scale)
    levels = codec.whole_levels(128)
    assert isinstance(codec, LloydRows) and levels is not None
    multiples = torch.tensor(levels[0])[codec.packing.unpack(codes, 128).int()]
    assert torch.equal(2 * found.int() + 1, multiples)
    row = multiples * levels[1] * scale
    torch.testing.assert_close(row, codec.decode(codes, scale, None, 128), atol=1e-6, rtol=3e-2)
    assert torch.equal(found_scale, scale.float())


@pytest.mark.parametrize("axis", ["keys", "values"])
def test_lanes_put_blocks_in_order(library: ctypes.CDLL, axis: str, seed: int) -> None:
    codec = ROW_CODECS["tq3_0"]
    codes, scale = codec.encode(torch.randn(64, 128), None)
    found, found_scale = decoded(library, codec, axis, codes, scale)
    row = found.float().unflatten(1, (4, 32)) * found_scale.unsqueeze(-1) * cuda.level_bytes(codec)[1]
    torch.testing.assert_close(row.flatten(1), codec.decode(codes, scale, None, 128), atol=1e-6, rtol=4e-3)


def test_lanes_find_steps_of_keys(library: ctypes.CDLL, seed: int) -> None:
    codec = ROW_CODECS["kvarn-4bit"]
    codes, scale = codec.encode(torch.randn(64, 128), None)
    found, numbers = decoded(library, codec, "keys", codes, scale)
    step, least, of_tokens = numbers.flatten().split((128, 128, 64))
    row = (found * step + least) * of_tokens.unsqueeze(1)
    torch.testing.assert_close(row, codec.decode(codes, scale, None, 128))


def test_lanes_find_steps_of_values(library: ctypes.CDLL, seed: int) -> None:
    codec = ROW_CODECS["kvarn-2bit"]
    codes, scale = codec.encode(torch.randn(64, 128), None)
    found, numbers = decoded(library, codec, "values", codes, scale)
    steps, of_channels = numbers.flatten().split((128, 128))
    step, least = steps.view(64, 2, 1).unbind(1)
    unit = 4.0 ** -(torch.arange(128) % 4)
    row = (found.view(torch.uint8) * unit * step + least) * of_channels
    torch.testing.assert_close(row, codec.decode(codes, scale, None, 128))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"value_codec": CodecId.LLOYD_2BIT, "centred": True, "rope_dim": 64}, None),
        ({"head_dim": 64}, "head dim 64 is not 128"),
        ({"key_codec": CodecId.DENSE}, "codec 0 of keys is not one of"),
        ({"value_codec": CodecId.ROTATED_3BIT}, "codec 2 of values has no kernel with codec 5 of keys"),
        ({"key_codec": CodecId.POLAR_INT4, "value_codec": CodecId.POLAR_INT4}, None),
        ({"key_codec": CodecId.TQ3_0, "value_codec": CodecId.TQ3_0, "centred": True}, None),
        ({"key_codec": CodecId.KVARN_4BIT, "value_codec": CodecId.KVARN_2BIT}, None),
        ({"key_codec": CodecId.KVARN_4BIT}, "codec 6 of values has no kernel with codec 14 of keys"),
        (
            {"key_codec": CodecId.TQ3_0, "value_codec": CodecId.POLAR_INT4},
            "codec 8 of values has no kernel with codec 9",
        ),
        ({"centred": True, "rope_dim": 20}, "RoPE rotates 20 dimensions of centred keys, no multiple of 8"),
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
    with pytest.raises(ValueError, match="takes 128 dimensions of coded rows, not 128 in dense and dense"):
        cuda.attend_coded(torch.zeros(1, 1, 128), rows, rows, *torch.zeros(2, 1, dtype=torch.int64))


@pytest.mark.parametrize("centred", [False, True])
def test_splits_fill_the_device_and_leave_every_warp_two_pages(centred: bool) -> None:
    for units, entries in ((8, 960), (8, 1952), (120, 960), (384, 300)):
        blocks = units * cuda.splits(units, entries, 132, centred)
        places = 132 * cuda.RESIDENT_BLOCKS[centred]
        assert 0.9 <= blocks / places / -(-blocks // places) <= 1
    assert cuda.splits(8, 64, 132, centred) == 32 // cuda.WARPS[centred]
    assert cuda.splits(8, 0, 132, centred) == cuda.splits(10000, 960, 132, centred) == 1
