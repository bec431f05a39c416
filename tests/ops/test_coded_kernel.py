"""The CUDA kernel of attention over coded tokens against the reference. It runs on a CPU, whose threads take turns."""

import ctypes
import math
import shutil
from pathlib import Path

import pytest
import torch
from compiled_source import CSRC, compiled
from torch import Tensor
from whole_levels import with_whole_levels

from shadowkv.kvcache.codecs import ROW_CODECS
from shadowkv.ops.attend_coded import cuda, reference
from shadowkv.ops.attend_selected.sources import CodedRows

HERE = Path(__file__).parent
PAIRS = [
    ("lloyd-4bit", "lloyd-3bit"),
    ("lloyd-3bit", "lloyd-2bit"),
    ("polar-int4", "polar-int4"),
    ("kvarn-4bit", "kvarn-2bit"),
    ("tq3_0", "tq3_0"),
]

pytestmark = pytest.mark.usefixtures("seed")


class Rows(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "pages", "scale_pages")),
        *((name, ctypes.c_int64) for name in ("codec", "page", "scale_page")),
        ("levels", ctypes.c_uint64),
        ("step", ctypes.c_double),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("kernel")
    shutil.copytree(CSRC / "kernels/attend_coded", folder / "kernels/attend_coded")
    shutil.copy(CSRC / "constants.h", folder)
    shutil.copytree(HERE / "coded_kernel/common", folder / "kernels/common")
    shutil.copy(HERE / "coded_kernel/kernel.cpp", folder)
    for name in ("cuda_fp16.h", "cuda_runtime.h", "permute.h"):
        shutil.copy(HERE / "cuda_on_cpu" / name, folder)
    return compiled(folder / "kernel.cpp", "-O1", "-fno-extern-tls-init", "-fno-strict-aliasing", f"-I{folder}")


def stored(name: str, rows: Tensor) -> CodedRows:
    """Rows [H, n, 128] of one sequence in shuffled pages. All other pages have bytes of 255."""
    heads, entries = len(rows), rows.shape[1] // 64
    codec = ROW_CODECS[name]
    rotation = codec.rotation_matrix(128, "keys") if codec.rotated else None
    pages = torch.randperm(2 * entries)[:entries]
    fields = []
    for part in codec.encode(rows, rotation):
        store = torch.full((2 * entries, heads, 64, part.shape[-1]), 255, dtype=torch.uint8).to(part.dtype)
        store[pages] = part.unflatten(1, (entries, 64)).transpose(0, 1)
        fields.append(store)
    return CodedRows(fields[0].unsqueeze(3), fields[1], codec, 128, rotation, pages[None])


def as_rows(source: CodedRows) -> Rows:
    levels, step = cuda.level_bytes(source.codec)
    assert source.codes.is_contiguous() and source.scale.is_contiguous()
    scale_page = source.scale[0].numel() * source.scale.element_size()
    return Rows(
        source.codes.data_ptr(), source.scale.data_ptr(), source.pages.data_ptr(), source.pages.data_ptr(),
        source.codec.id, source.codes[0].numel(), scale_page, levels & 2**64 - 1, step,
    )  # fmt: skip


def by_threads(
    library: ctypes.CDLL, q: Tensor, keys: CodedRows, values: CodedRows, begin: Tensor, end: Tensor, splits: int
) -> tuple[Tensor, Tensor]:
    """Calls the kernel like the op, with outputs that hold NaN before."""
    heads, entries, rows = keys.codes.shape[1], keys.pages.shape[1], q.shape[1]
    asked = (q if keys.rotation is None else q @ keys.rotation).contiguous()
    shapes = (1, rows, 128), (1, rows), (1, rows, splits, 128), (1, rows, splits)
    outs = [torch.full(shape, torch.nan) for shape in shapes]
    sides = [ctypes.byref(as_rows(side)) for side in (keys, values)]
    library.attend.restype = ctypes.c_bool
    at = [ctypes.c_void_p(x.data_ptr()) for x in (asked, begin, end, *outs)]
    sizes = heads, rows // heads, entries, splits
    assert library.attend(at[0], *sides, *at[1:3], *sizes, *at[3:]), "threads wait for others that have ended"
    out, lse, partial_out, partial_lse = outs
    if splits > 1:
        lse = (partial_lse * math.log(2)).logsumexp(-1)
        weights = (partial_lse * math.log(2) - lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1)).exp()
        out = (partial_out * weights.unsqueeze(-1)).sum(-2)
    return out if values.rotation is None else out @ values.rotation.T, lse


@pytest.mark.parametrize(("begin", "end", "splits", "group"), [(0, 384, 1, 4), (70, 320 - 7, 2, 5), (8, 63, 1, 1)])
@pytest.mark.parametrize(("keys", "values"), PAIRS)
def test_attention_is_that_of_the_reference(
    library: ctypes.CDLL, keys: str, values: str, begin: int, end: int, splits: int, group: int
) -> None:
    tokens = -(-end // 64) * 64
    of_tokens, of_channels = (0.3 * torch.randn(2, tokens, 1)).exp(), (0.3 * torch.randn(128)).exp()
    sides = [stored(name, of_tokens * torch.randn(2, tokens, 128) * of_channels) for name in (keys, values)]
    q = torch.randn(1, 2 * group, 128)
    span = torch.tensor([begin]), torch.tensor([end])
    out, lse = by_threads(library, q, *sides, *span, splits)
    exact = [with_whole_levels(side) for side in sides]
    expected, expected_lse = reference.attend_coded(q, *exact, *span)
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=2e-4, rtol=1e-5)
