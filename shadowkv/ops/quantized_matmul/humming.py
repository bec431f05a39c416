"""Matrix products with quantized weights on a GPU, for one matrix or for the matrices of experts, with the kernels of
github.com/vllm-project/humming.

The library compiles kernels for every shape with NVRTC and keeps them in ``~/.humming/cache``.
``layers/quantized_matrix.py`` packs weights when a model is loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from tqdm import tqdm

from shadowkv.installation import adding
from shadowkv.ops.case import unless
from shadowkv.ops.extension import dotted, gpu_missing, torch_version
from shadowkv.ops.quantized.codings import Coding, code, coding
from shadowkv.ops.quantized.rows import Form, QuantizedRows

MIN_CAPABILITY = (8, 0)
"""Lowest compute capability whose tensor cores have bfloat16."""

OLDEST_TORCH = (2, 11)
"""The library's own extension was built for the stable ABI of this torch."""

ROWS, COLUMNS = 128, 128
"""Stored rows and columns are padded to multiples of these, the kernels' largest tiles."""

COLUMNS_OF_EXPERTS = 64
"""Columns of experts are padded to multiples of this, and of their quantization group. 128 would waste too much,
because experts have few columns (2,880 in gpt-oss)."""

MULTIPLE = 8
"""K and N must be multiples of this: 8 bfloat16 activations take 16 bytes."""

BATCHES = (8, 16, 32, 48, 64, 96, 128, 192, 256, 512)
"""Each entry is a number of tokens that a kernel is tuned for. The kernel serves batches of up to this number of tokens
and of more than the previous entry. One more kernel serves larger batches. The library can make about forty kernels,
which differ in their tiles of tokens, but each takes seconds to compile."""

MANY = 4096
"""Number of tokens that the last kernel is tuned for."""

FEW_OF_EXPERTS = (8, 64)
"""A kernel is tuned for each of these numbers of rows, summed over all experts. Decode steps of few sequences have
about as many rows."""

OF_EACH = (2, 8, 16, 32, 64, 128)
"""A kernel is tuned for each of these numbers of rows per expert. All experts, also those of other ranks, are assumed
to be chosen equally often."""

MANY_OF_EACH = 256
"""Number of rows per expert that the last kernel of experts is tuned for."""

LOCKS = 4096
"""Number of counters with which thread blocks that share a tile wait for each other. Even on a GPU with 148
multiprocessors, kernels need fewer counters."""

NUMBERS_AT_ONCE = 2**24
"""How many numbers are converted at a time. Each takes about 20 bytes during the conversion."""


def missing() -> list[str]:
    """Reasons why the library cannot be used here."""
    installed, recent = find_spec("humming") is not None, torch_version() >= OLDEST_TORCH
    return [
        *gpu_missing(MIN_CAPABILITY),
        *unless(installed, f"humming-kernels is not installed: {adding('gpu')}"),
        *unless(recent, f"humming-kernels needs torch {dotted(OLDEST_TORCH)} or later, this is {torch.__version__}"),
    ]


def takes(form: Form, dtype: torch.dtype) -> bool:
    """Whether rows in ``form`` can be packed for products with activations in ``dtype``."""
    return coding(form) is not None and dtype == torch.bfloat16


@dataclass(frozen=True)
class Packed:
    """Weights in the library's layout, from which no rows can be cut out.

    Attributes:
        layer: the library's description of the weights, as JSON.
        tensors: weight, scales, zero points, factor and locks, by the library's names.
        columns: K.
        rows: N.
    """

    layer: str
    tensors: dict[str, Tensor]
    columns: int
    rows: int


class PackedRows(Packed):
    """A packed matrix [N, K]."""

    def __len__(self) -> int:
        return self.rows


@dataclass(frozen=True)
class PackedExperts(Packed):
    """Packed matrices of experts [E, N, K].

    Attributes:
        experts: E.
        total_experts: number of experts on all ranks.
    """

    experts: int
    total_experts: int


def quantized_matmul(x: Tensor, weight: PackedRows) -> Tensor:
    """Same as the reference, in bfloat16, with packed rows. Can be captured in a CUDA graph after ``compile_kernels``
    with these rows.

    Dequantized weights are rounded to bfloat16, and so are scales unless they have 8 bits. Sums are in float32.
    """
    return launch(x, weight)


def launch(x: Tensor, weight: Packed, offsets: Tensor | None = None) -> Tensor:
    """Returns x Wᵀ, bfloat16 [T, N], of ``x`` bfloat16 [T, K]. Experts need ``offsets`` int32 [E + 1], as in
    ``grouped_quantized_matmul``."""
    if x.dtype != torch.bfloat16 or x.shape[1] != weight.columns:
        raise ValueError(f"x has shape {tuple(x.shape)} and {x.dtype}, but needs K = {weight.columns} and bfloat16")
    if not len(x):
        return x.new_empty(0, weight.rows)
    tensors, kernels = weight.tensors, _kernels(weight.layer, x.device.index, _total_experts(weight))
    product: Tensor = torch.ops.humming.launch_kernel.default(
        *(kernels, x, tensors["weight"], tensors["weight_scale"], tensors.get("weight_scale_2")),
        *(None, None, tensors.get("zero_point"), None, None, None, None, None, offsets, tensors["locks"], 1, 0),
    )
    return product


_importing = Lock()


@cache
def _import_library() -> None:
    """Imports the library without torch._dynamo, which takes seven seconds to load. The library uses a decorator for
    torch.compile, and this decorator would load torch._dynamo. The decorator is left out, because torch.compile is not
    used here."""
    with _importing:
        decorator = torch.compiler.assume_constant_result
        torch.compiler.assume_constant_result = lambda function: function
        try:
            import_module("humming")
        finally:
            torch.compiler.assume_constant_result = decorator


@torch.no_grad()
def pack_rows(rows: QuantizedRows) -> PackedRows:
    """Packs rows [N, K] on a GPU, in a form that ``takes`` accepts, for products in bfloat16. Raises ValueError if N or
    K is not a multiple of 8."""
    layout = _Layout.of(rows, 1, COLUMNS)
    packed = {name: tensor.squeeze(0) if tensor.ndim > 1 else tensor for name, tensor in layout.packed(rows).items()}
    packed["locks"] = torch.zeros(LOCKS, dtype=torch.int32, device=layout.device)
    return PackedRows(layout.described().to_str(), packed, rows.columns, len(rows))


@torch.no_grad()
def pack_experts(rows: QuantizedRows, experts: int, total_experts: int | None = None) -> PackedExperts:
    """As ``pack_rows``, for rows [E N, K], one expert after another. ``total_experts`` is the number of experts on all
    ranks; None for E. Experts are packed a few at a time: as many as have ``NUMBERS_AT_ONCE`` numbers together, but at
    least one. Besides the rows and the result, packing needs memory for the experts that are packed at a time."""
    layout, packed = _Layout.of(rows, experts, COLUMNS_OF_EXPERTS), dict[str, Tensor]()
    at_once = max(1, NUMBERS_AT_ONCE // (layout.rows * layout.columns))
    for first in range(0, experts, at_once):
        some = slice(first, first + at_once)
        for name, tensor in layout.packed(rows[some.start * layout.rows : some.stop * layout.rows]).items():
            if name not in packed:
                packed[name] = tensor.new_empty(experts, *tensor.shape[1:])
            packed[name][some].copy_(tensor)
    packed["locks"] = torch.zeros(LOCKS, dtype=torch.int32, device=layout.device)
    described = layout.described(experts).to_str()
    return PackedExperts(described, packed, rows.columns, layout.rows, experts, total_experts or experts)


@dataclass(frozen=True)
class _Layout:
    """How one matrix [N, K], or each expert's matrix, is stored.

    Attributes:
        coding: coding of the numbers.
        rows, columns: N and K.
        high, wide: N and K after padding.
        shared: whether all rows of a matrix have the same factor.
        device: where the matrix is.
    """

    coding: Coding
    rows: int
    columns: int
    high: int
    wide: int
    shared: bool
    device: torch.device

    @staticmethod
    def of(rows: QuantizedRows, matrices: int, multiple: int) -> _Layout:
        """The layout of ``matrices`` matrices whose columns are padded to multiples of ``multiple``. Raises ValueError
        if kernels do not support their sizes."""
        found, count, columns = coding(rows.form), len(rows) // matrices, rows.columns
        assert found is not None
        if count % MULTIPLE or columns % MULTIPLE:
            raise ValueError(
                f"weights in {rows.form.name} need sizes in multiples of {MULTIPLE}, not {count} x {columns}"
            )
        _import_library()
        multiple = max(multiple, found.group or 0)
        high, wide = -(-count // ROWS) * ROWS, -(-columns // multiple) * multiple
        shared = False
        if found.factor:
            factors = rows.tensors[-1].view(matrices, count)
            shared = bool((factors == factors[:, :1]).all())
        return _Layout(found, count, columns, high, wide, shared, rows.tensors[0].device)

    def packed(self, rows: QuantizedRows) -> dict[str, Tensor]:
        """The library's tensors, [n, ...] each, for rows [n N, K] of n matrices."""
        from humming import ops
        from humming.transform import transform_humming_tensors

        found, high, parts = self.coding, self.high, dict[str, list[Tensor]]()
        for _, tile in rows.tiles(NUMBERS_AT_ONCE):
            coded = code(tile)
            codes = pad(coded.codes.to(torch.int32), (0, self.wide - self.columns))
            words = ops.pack_weight(codes.contiguous(), found.bits)
            named = {"words": words, "scales": coded.scales, "zeros": coded.zeros, "factor": coded.factor}
            for name, part in named.items():
                if part is not None:
                    parts.setdefault(name, []).append(part)
        of = {name: torch.cat(some).unflatten(0, (-1, self.rows)) for name, some in parts.items()}
        groups = 1 if found.group is None else self.wide // found.group
        tensors = {"weight": pad(of["words"], (0, 0, 0, high - self.rows))}
        tensors["weight_scale"] = _padded(of["scales"], high, groups, found.scale)
        if found.zeros:
            tensors["zero_point"] = _padded(of["zeros"], high, groups, None)
        if found.factor:
            factor = of["factor"].squeeze(2)
            padded = pad(factor, (0, high - self.rows)).bfloat16()
            tensors["weight_scale_2"] = factor[:, 0].contiguous() if self.shared else padded
        made: dict[str, Tensor] = transform_humming_tensors(self.described(), tensors, already_padded=True)
        return made

    def described(self, experts: int = 0) -> Any:
        """The library's description of one matrix, or of ``experts`` matrices."""
        from humming.config import LayerConfig

        found = self.coding
        scales = {None: "bfloat16", torch.float8_e4m3fn: "float8e4m3", torch.float8_e8m0fnu: "float8e8m0"}
        with torch.cuda.device(self.device):
            return LayerConfig(
                shape_n=self.high,
                shape_k=self.wide,
                pad_shape_n=self.high - self.rows,
                pad_shape_k=self.wide - self.columns,
                num_experts=experts,
                a_dtype="bfloat16",
                c_dtype="bfloat16",
                b_dtype={"e2m1": "float4e2m1", "e4m3": "float8e4m3"}.get(found.element, found.element),
                bs_dtype=scales[found.scale],
                weight_scale_group_size=found.group or 0,
                weight_scale_2_type=("tensor" if self.shared else "channel") if found.factor else None,
                has_zero_point=found.zeros,
                is_fp_zero_point=found.zeros,
            )


def _padded(of_groups: Tensor, rows: int, groups: int, dtype: torch.dtype | None) -> Tensor:
    """Pads [n, N, G] to [n, rows, groups] with zero bits. ``dtype`` is the 8-bit dtype of input and result. If it is
    None, the result is bfloat16."""
    if dtype is None:
        of_groups = of_groups.bfloat16()
    raw = of_groups.view(torch.uint8) if dtype is not None else of_groups
    raw = pad(raw, (0, groups - raw.shape[2], 0, rows - raw.shape[1]))
    return raw.view(of_groups.dtype).contiguous()


def _total_experts(weight: Packed) -> int:
    return weight.total_experts if isinstance(weight, PackedExperts) else 0


@cache
def _kernels(layer: str, device: int, total_experts: int) -> Tensor:
    """Returns a layer's kernels for ``launch_kernel``, int64 [4 x kernels] on the host. Each kernel has four numbers:
    an exclusive lower bound and an inclusive upper bound on the number of tokens, its id, and the number of
    multiprocessors that it runs on (0 for all)."""
    sizes = _sizes(layer, total_experts)
    bounds = (0, *list(sizes)[:-1], 1 << 30)
    kernels = [_kernel(layer, tokens, device) for tokens in sizes.values()]
    entries = [(low, high, *kernel) for low, high, kernel in zip(bounds, bounds[1:], kernels, strict=False)]
    return torch.tensor(entries, dtype=torch.int64).flatten()


def _sizes(layer: str, total_experts: int) -> dict[int, int]:
    """Returns, for each kernel of a layer, the largest number of tokens that it serves, ascending, and the number that
    it is tuned for. The last kernel serves larger numbers too. For experts, the first number counts the rows of all
    ranks, and the second the rows that this rank is expected to have."""
    experts = json.loads(layer)["num_experts"]
    if not experts:
        return {tokens: tokens for tokens in (*BATCHES, MANY)}
    totals = *sorted({*FEW_OF_EXPERTS, *(total_experts * each for each in OF_EACH)}), total_experts * MANY_OF_EACH
    return {total: max(FEW_OF_EXPERTS[0], -(-total * experts // total_experts)) for total in totals}


@cache
def _kernel(layer: str, tokens: int, device: int) -> tuple[int, int]:
    """Compiles the kernel that is tuned for ``tokens`` tokens, if necessary. Returns the kernel's id and the number of
    multiprocessors that it runs on (0 for all)."""
    from humming.kernel.humming import HummingKernel
    from humming.tune import get_heuristics_config

    described = json.loads(layer)
    gemm = "grouped_contiguous" if described["num_experts"] else "dense"
    _let_the_compiler_find_its_parts()
    with torch.cuda.device(device):
        tuned = dict(get_heuristics_config(described, shape_m=tokens, gemm_type=gemm, device=device))
        processors = tuned.pop("num_sms", 0)
        if described["num_experts"]:
            # With programmatic dependent launch, the kernel could read ``offsets`` before they are written.
            tuned["use_pdl"] = False
        return HummingKernel(**described, **tuned, gemm_type=gemm).kernel_id, processors


@cache
def _let_the_compiler_find_its_parts() -> None:
    """Adds the folder of PyPI's NVRTC to LD_LIBRARY_PATH. humming starts processes that run NVRTC, and NVRTC looks up a
    second library of this folder by its name alone."""
    from humming.utils.nvrtc import get_nvrtc_library_path

    folder, before = str(Path(get_nvrtc_library_path()).resolve().parent), os.environ.get("LD_LIBRARY_PATH", "")
    if folder not in before.split(":"):
        os.environ["LD_LIBRARY_PATH"] = f"{folder}:{before}".rstrip(":")


def compile_kernels(packed: Iterable[Packed]) -> None:
    """Compiles the kernels for packed rows [N, K] and experts [E, N, K], and loads them into the GPU, so that graphs
    can capture them. It compiles on all CPU cores and shows a progress bar if the output is a terminal."""
    layers = {weight.layer: weight for weight in packed}
    if not layers:  # without weights, the library need not be installed
        return
    from humming.utils.cpu import get_parallel_build_workers

    device = next(iter(layers.values())).tensors["weight"].device
    sizes = {layer: _sizes(layer, _total_experts(weight)) for layer, weight in layers.items()}
    wanted = [(layer, tokens) for layer in layers for tokens in {*sizes[layer].values()}]
    wanted.sort(key=itemgetter(1), reverse=True)  # the largest take longest
    with ThreadPoolExecutor(get_parallel_build_workers()) as pool:
        compiled = pool.map(lambda of: _kernel(*of, device.index), wanted)
        for _ in tqdm(compiled, "compiling kernels", len(wanted), unit="kernel", leave=False, disable=None):
            pass
    for layer, weight in layers.items():
        for below in (0, *list(sizes[layer])[:-1]):
            x, offsets = torch.zeros(below + 1, weight.columns, dtype=torch.bfloat16, device=device), None
            if isinstance(weight, PackedExperts):  # all rows belong to the first expert
                offsets = torch.full((weight.experts + 1,), len(x), dtype=torch.int32, device=device)
                offsets[0] = 0
            launch(x, weight, offsets)
