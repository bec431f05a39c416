"""Products with rows of quantised numbers on a GPU, of one matrix or of experts, by the kernels of
github.com/vllm-project/humming, which are compiled here for every shape, with NVRTC, and kept in
``~/.humming/cache``."""

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
from shadowkv.ops.quantised.codings import Coding, code, coding
from shadowkv.ops.quantised.rows import Form, QuantisedRows

MIN_CAPABILITY = (8, 0)
"""Of tensor cores with bfloat16."""

OLDEST_TORCH = (2, 11)
"""Whose stable interface the library's own extension was built for."""

ROWS, COLUMNS = 128, 128
"""Rows and columns are padded to multiples of these, as they are stored: tiles of the kernels are such, or smaller."""

COLUMNS_OF_EXPERTS = 64
"""Columns of experts are padded to multiples of this, and of their groups: they have fewer, and gpt-oss 2,880."""

MULTIPLE = 8
"""K and N must be multiples of this: 16 bytes of activations."""

BATCHES = (8, 16, 32, 48, 64, 96, 128, 192, 256, 512)
"""Most tokens that kernels are tuned for, one for each of these, and one for more. The library knows about forty, which
differ in their tiles of tokens; each takes seconds to compile."""

MANY = 4096
"""Tokens that the last kernel is tuned for."""

FEW_OF_EXPERTS, OF_EACH, MANY_OF_EACH = (8, 64), (2, 8, 16, 32, 64, 128), 256
"""The same for rows of all experts together: a step of one sequence or few, rows of each where they are chosen equally
often, and those that the last kernel is tuned for."""

LOCKS = 4096
"""Counters that blocks with shares of one tile wait for each other by: more than kernels need on 148 processors."""

NUMBERS_AT_ONCE = 2**24
"""Numbers that are coded at a time: they take some 20 bytes each meanwhile."""


def missing() -> list[str]:
    """The reasons why there are no such products here; none if there are."""
    installed, recent = find_spec("humming") is not None, torch_version() >= OLDEST_TORCH
    return [
        *gpu_missing(MIN_CAPABILITY),
        *unless(installed, f"humming-kernels is not installed: {adding('gpu')}"),
        *unless(recent, f"humming-kernels needs torch {dotted(OLDEST_TORCH)} or later, this is {torch.__version__}"),
    ]


def takes(form: Form, dtype: torch.dtype) -> bool:
    """Whether rows in a form can be packed for products with activations in ``dtype``."""
    return coding(form) is not None and dtype == torch.bfloat16


@dataclass(frozen=True)
class Packed:
    """Numbers in the library's layout, which has no rows that could be cut out.

    Attributes:
        layer: the library's description of them, in its JSON.
        tensors: weight, scales, zero points, factor and locks, by the library's names.
        columns: K.
        rows: N.
    """

    layer: str
    tensors: dict[str, Tensor]
    columns: int
    rows: int


class PackedRows(Packed):
    """Rows [N, K]."""

    def __len__(self) -> int:
        return self.rows


@dataclass(frozen=True)
class PackedExperts(Packed):
    """Matrices of experts [E, N, K].

    Attributes:
        experts: E.
    """

    experts: int


def quantised_matmul(x: Tensor, weight: PackedRows) -> Tensor:
    """Same as the reference, in bfloat16, with rows that were packed; one kernel, which a graph can capture once
    ``compile_kernels`` has had these rows.

    Scales are rounded to bfloat16, unless they have 8 bits, as are numbers of single weights on their way to tensor
    cores; sums are in float32.
    """
    return launch(x, weight)


def launch(x: Tensor, weight: Packed, offsets: Tensor | None = None) -> Tensor:
    """x Wᵀ, bfloat16 [T, K] -> [T, N]; of experts with ``offsets`` as ``grouped_quantised_matmul`` has them."""
    if x.dtype != torch.bfloat16 or x.shape[1] != weight.columns:
        raise ValueError(f"x has shape {tuple(x.shape)} and {x.dtype}: needs K = {weight.columns} in bfloat16")
    if not len(x):
        return x.new_empty(0, weight.rows)
    tensors, kernels = weight.tensors, _kernels(weight.layer, x.device.index)
    product: Tensor = torch.ops.humming.launch_kernel.default(
        *(kernels, x, tensors["weight"], tensors["weight_scale"], tensors.get("weight_scale_2")),
        *(None, None, tensors.get("zero_point"), None, None, None, None, None, offsets, tensors["locks"], 1, 0),
    )
    return product


_importing = Lock()


@cache
def _import_library() -> None:
    """Imports it without torch._dynamo, which takes seven seconds: a decorator of the library's loads that, for
    torch.compile alone, of which nothing here is made."""
    with _importing:
        decorator = torch.compiler.assume_constant_result
        torch.compiler.assume_constant_result = lambda function: function
        try:
            import_module("humming")
        finally:
            torch.compiler.assume_constant_result = decorator


@torch.no_grad()
def pack_rows(rows: QuantisedRows) -> PackedRows:
    """Rows [N, K] on a GPU, in a form that it ``takes``, in the library's layout, for products in bfloat16; raises
    ValueError where N or K is no multiple of 8."""
    layout = _Layout.of(rows, 1, COLUMNS)
    packed = {name: tensor.squeeze(0) if tensor.ndim > 1 else tensor for name, tensor in layout.packed(rows).items()}
    packed["locks"] = torch.zeros(LOCKS, dtype=torch.int32, device=layout.device)
    return PackedRows(layout.described().to_str(), packed, rows.columns, len(rows))


@torch.no_grad()
def pack_experts(rows: QuantisedRows, experts: int) -> PackedExperts:
    """As ``pack_rows``, of rows [E N, K], those of one expert after the other; beside them and the result there is one
    expert at a time, or as many as have ``NUMBERS_AT_ONCE``."""
    layout, packed = _Layout.of(rows, experts, COLUMNS_OF_EXPERTS), dict[str, Tensor]()
    at_once = max(1, NUMBERS_AT_ONCE // (layout.rows * layout.columns))
    for first in range(0, experts, at_once):
        some = slice(first, first + at_once)
        for name, tensor in layout.packed(rows[some.start * layout.rows : some.stop * layout.rows]).items():
            if name not in packed:
                packed[name] = tensor.new_empty(experts, *tensor.shape[1:])
            packed[name][some].copy_(tensor)
    packed["locks"] = torch.zeros(LOCKS, dtype=torch.int32, device=layout.device)
    return PackedExperts(layout.described(experts).to_str(), packed, rows.columns, layout.rows, experts)


@dataclass(frozen=True)
class _Layout:
    """How a matrix [N, K], or that of every expert, is stored.

    Attributes:
        coding: of its numbers.
        rows, columns: N and K.
        high, wide: the same, padded.
        shared: rows of a matrix have the same factor.
    """

    coding: Coding
    rows: int
    columns: int
    high: int
    wide: int
    shared: bool
    device: torch.device

    @staticmethod
    def of(rows: QuantisedRows, matrices: int, multiple: int) -> _Layout:
        """That of rows of as many matrices, whose columns are padded to multiples of ``multiple``; raises ValueError
        for sizes that kernels do not take."""
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

    def packed(self, rows: QuantisedRows) -> dict[str, Tensor]:
        """Tensors [n, ...] of rows of n matrices, [n N, K]."""
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
        """The library's description of one matrix, or of those of experts."""
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
    """[n, N, G] -> [n, rows, groups] in ``dtype``, None for bfloat16; what is added is multiplied with codes of 0
    alone."""
    if dtype is None:
        of_groups = of_groups.bfloat16()
    raw = of_groups.view(torch.uint8) if dtype is not None else of_groups
    raw = pad(raw, (0, groups - raw.shape[2], 0, rows - raw.shape[1]))
    return raw.view(of_groups.dtype).contiguous()


@cache
def _kernels(layer: str, device: int) -> Tensor:
    """Kernels for rows of a layer, int64 [4 x their number] on the host: above and up to how many tokens each runs, its
    number, and of processors 0 for all."""
    sizes = _sizes(layer)
    bounds = (0, *sizes[:-1], 1 << 30)
    kernels = [_kernel(layer, tokens, device) for tokens in sizes]
    entries = [(low, high, *kernel) for low, high, kernel in zip(bounds, bounds[1:], kernels, strict=False)]
    return torch.tensor(entries, dtype=torch.int64).flatten()


def _sizes(layer: str) -> tuple[int, ...]:
    """Tokens, or rows of all experts, that kernels of a layer are tuned for; the last runs for all above."""
    experts = json.loads(layer)["num_experts"]
    if not experts:
        return (*BATCHES, MANY)
    return (*sorted({*FEW_OF_EXPERTS, *(experts * each for each in OF_EACH)}), experts * MANY_OF_EACH)


@cache
def _kernel(layer: str, tokens: int, device: int) -> tuple[int, int]:
    """The number of a kernel, which is compiled if it was not before, and of the processors that it runs on."""
    from humming.kernel.humming import HummingKernel
    from humming.tune import get_heuristics_config

    described = json.loads(layer)
    gemm = "grouped_contiguous" if described["num_experts"] else "dense"
    _let_the_compiler_find_its_parts()
    with torch.cuda.device(device):
        tuned = dict(get_heuristics_config(described, shape_m=tokens, gemm_type=gemm, device=device))
        processors = tuned.pop("num_sms", 0)
        if described["num_experts"]:
            # Where experts' rows end is read before a kernel waits for the one before it, which may write that.
            tuned["use_pdl"] = False
        return HummingKernel(**described, **tuned, gemm_type=gemm).kernel_id, processors


@cache
def _let_the_compiler_find_its_parts() -> None:
    """NVRTC from PyPI, in the library's processes, looks for a second library beside it by name alone."""
    from humming.utils.nvrtc import get_nvrtc_library_path

    folder, before = str(Path(get_nvrtc_library_path()).resolve().parent), os.environ.get("LD_LIBRARY_PATH", "")
    if folder not in before.split(":"):
        os.environ["LD_LIBRARY_PATH"] = f"{folder}:{before}".rstrip(":")


def compile_kernels(packed: Iterable[Packed]) -> None:
    """Compiles what products with rows [N, K], or with experts' [E, N, K], need and loads it into the GPU, so that
    graphs can capture them: on all processors, with a progress bar if the output is a terminal."""
    layers = {weight.layer: weight for weight in packed}
    if not layers:  # then the library need not be there
        return
    from humming.utils.cpu import get_parallel_build_workers

    device = next(iter(layers.values())).tensors["weight"].device
    wanted = [(layer, tokens) for layer in layers for tokens in _sizes(layer)]
    wanted.sort(key=itemgetter(1), reverse=True)  # the largest take longest
    with ThreadPoolExecutor(get_parallel_build_workers()) as pool:
        compiled = pool.map(lambda of: _kernel(*of, device.index), wanted)
        for _ in tqdm(compiled, "compiling kernels", len(wanted), unit="kernel", leave=False, disable=None):
            pass
    for layer, weight in layers.items():
        for below in (0, *_sizes(layer)[:-1]):
            x, offsets = torch.zeros(below + 1, weight.columns, dtype=torch.bfloat16, device=device), None
            if isinstance(weight, PackedExperts):  # all rows are the first one's
                offsets = torch.full((weight.experts + 1,), len(x), dtype=torch.int32, device=device)
                offsets[0] = 0
            launch(x, weight, offsets)
