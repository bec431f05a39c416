"""Loads the libraries of the compiled backends, or returns the reason why a library cannot be used. ``registry`` calls
these functions through the backends' ``missing``. ``doctor`` and the start-up lines show the reasons."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shadowkv.installation import clone
from shadowkv.ops.cuda_compiler import OLDEST_CAPABILITY, OLDEST_TORCH
from shadowkv.ops.page import PAGE
from shadowkv.ops.quantized.blocks import BLOCKS
from shadowkv.ops.sign_scores.reference import RUN
from shadowkv.ops.sketch_queries.reference import PLANES, plane_bytes
from shadowkv.ops.sources import cuda_digest, is_current

PACKAGE = Path(__file__).resolve().parent.parent

CUDA_FOLDER = PACKAGE / "_cuda"
"""Where ``csrc/build_cuda.py`` puts the libraries of the CUDA backends."""

HOPPER = (9, 0)
"""Compute capability of Hopper, for which kernels with wgmma are built."""


class Unbuilt(str):
    """A reason why a library cannot be used. Building the library, or building it again, removes the reason."""


def torch_version() -> tuple[int, int]:
    """Major and minor version of the imported torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def cpu_library() -> Path:
    """Returns the path of the C++ backends' library, whether or not the file exists. The library is for this Python and
    this minor version of torch, because torch's C++ interface changes with each minor version."""
    major, minor = torch_version()
    return PACKAGE / f"_cpu_torch{major}_{minor}{EXTENSION_SUFFIXES[0]}"


@cache
def cpu_missing() -> list[str]:
    """Loads the library of the C++ backends as ``torch.ops.shadowkv``. Returns the reason if it cannot be used,
    otherwise ``[]``."""
    path = cpu_library()
    if not path.exists():
        return [Unbuilt(_built_for_another() or "not built")]
    # Without a clone, the library was installed together with the package.
    if (folder := clone()) is not None and not is_current(path, folder):
        return [Unbuilt(f"{path.name} was built from sources that have changed since")]
    functions = (
        _attend_selected,
        _causal_convolution,
        _decode_layers,
        _dequantize_blocks,
        _gated_delta_rule,
        _paged_attention,
        _quantized_matmul,
        _select_by_sketch,
        _sign_scores,
        _sketch_queries,
        _ssd,
    )
    return _load(path, "shadowkv", {fake.__name__[1:]: fake for fake in functions})


def _load(path: Path, namespace: str, fakes: dict[str, Callable[..., Any]]) -> list[str]:
    """Loads a library and registers the fake implementations of its ops. Returns the reason if the library cannot be
    used, otherwise ``[]``."""
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return [Unbuilt(f"{path.name} cannot be loaded: {error.__cause__ or error}")]
    if lacking := [name for name in fakes if not hasattr(getattr(torch.ops, namespace), name)]:
        return [Unbuilt(f"{path.name} is of an older version and lacks {', '.join(lacking)}")]
    for name, fake in fakes.items():
        torch.library.register_fake(f"{namespace}::{name}", fake)
    return []


def _built_for_another() -> str | None:
    """Says that the existing C++ libraries are built for other versions of torch, and how to install one of them. Or
    says that the libraries are built for another Python. Returns None if there is no library."""
    pattern = re.compile(r"_cpu_torch(\d+)_(\d+)\.(.+)")
    libraries = [found.groups() for path in PACKAGE.glob("_cpu_torch*.so") if (found := pattern.fullmatch(path.name))]
    if fitting := sorted(
        (int(major), int(minor)) for major, minor, ending in libraries if f".{ending}" == EXTENSION_SUFFIXES[0]
    ):
        versions = [dotted(version) for version in fitting]
        needed = f"the C++ ops are built for torch {', '.join(versions)}, and this is {torch.__version__}"
        return f"{needed}; pip install 'torch=={versions[-1]}.*' brings them back"
    return "the C++ ops are built for another Python" if libraries else None


def block_memory(device: torch.device) -> int:
    """Bytes of shared memory available to one thread block on a GPU."""
    properties: Any = torch.cuda.get_device_properties(device)  # PyTorch's stub lacks the attribute below
    return int(properties.shared_memory_per_block_optin)


def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _attend_selected(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def _causal_convolution(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


def _decode_layers(
    x: Tensor, attended: Any, gate: Any, vectors: Any, matrices: list[Tensor], forms: Any, row_blocks: list[int],
    attentions: list[bool], head_norms: Any, k: list[Tensor], *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    heads, dim, gated, inputs = k[0].shape[1], k[0].shape[3], rest[9], 4 * attentions.index(True)
    first = sum(row_blocks[:inputs])
    rows = sum(len(matrix) for matrix in matrices[first : first + row_blocks[inputs]])
    queries = (rows // dim - 2 * heads) // (2 if gated else 1)
    q = x.new_empty(len(x), queries, dim)
    return x.new_empty(x.shape), q, q.new_empty(q.shape), q.new_empty(q.shape[:2]), q[:, : queries if gated else 0]


def _gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return v.new_empty(v.shape)


def _paged_attention(q: Tensor, k: Tensor, v: Tensor, pages: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def _sign_scores(whole: Tensor, unit: Tensor, signs: Tensor, scale: Tensor, pages: Tensor, num_pages: Tensor) -> Tensor:
    return unit.new_empty(len(pages), signs.shape[1], PAGE // RUN * pages.shape[1], dtype=torch.float16)


def _select_by_sketch(whole: Tensor, unit: Tensor, coarse: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = (*coarse.shape[:2], rest[-1])
    return coarse.new_empty(shape, dtype=torch.int64), coarse.new_empty(shape, dtype=torch.float32)


def _sketch_queries(q: Tensor, maps: Tensor, states: Tensor) -> tuple[Tensor, ...]:
    (batch, heads, dim), unit = q.shape, q.new_empty(q.shape[:2])
    whole = q.new_empty(batch, heads, 8, plane_bytes(dim), dtype=torch.int8)
    total, planes = unit.int(), whole[:, :, :PLANES].to(torch.uint8)
    return whole, unit, total, planes, total.clone(), unit.clone()


def _ssd(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


def _quantized_matmul(x: Tensor, blocks: Tensor, form: str) -> Tensor:
    return x.new_empty(len(x), len(blocks))


def _dequantize_blocks(blocks: Tensor, form: str) -> Tensor:
    return blocks.new_empty(len(blocks), BLOCKS[form].columns((blocks,)), dtype=torch.float32)


def _record() -> dict[str, Any]:
    """What ``csrc/build_cuda.py`` has recorded of the CUDA libraries; empty if there is no record."""
    path = CUDA_FOLDER / "built.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return record


def built_with() -> str | None:
    """Returns the version of nvcc that built the CUDA libraries, such as ``13.0.88``; None if it is not recorded."""
    version = _record().get("nvcc")
    return None if version is None else str(version)


def _has_changed(name: str) -> bool:
    """Whether a clone's sources of the CUDA library ``name`` are others than those that it was built from. Without a
    clone, the library was installed together with the package."""
    binding = None if (folder := clone()) is None else next(folder.glob(f"csrc/kernels/*/{name}.cu"), None)
    if folder is None or binding is None:
        return False
    return bool(_record().get("sources", {}).get(name) != cuda_digest(binding, folder))


def cuda_of_driver() -> tuple[int, int] | None:
    """The latest version of CUDA that the driver supports; None for a CPU build of torch."""
    ask: Any = getattr(torch._C, "_cuda_getDriverVersion", None)
    number = 0 if ask is None else int(ask())
    return (number // 1000, number % 1000 // 10) if number else None


def gpu_missing(least: tuple[int, int] = (0, 0)) -> list[str]:
    """Returns ``[]`` if there is a CUDA device of compute capability ``least`` or later, otherwise the reason."""
    if not torch.cuda.is_available():
        return ["there is no CUDA device"]
    present = torch.cuda.get_device_capability()
    return [] if present >= least else [f"compute capability {dotted(present)} is below {dotted(least)}"]


@cache
def cuda_missing(name: str, *fakes: str, capability: tuple[int, int] | None = None) -> list[str]:
    """Loads the library of a CUDA backend. Returns the reason if it cannot be used here, otherwise ``[]``.

    Args:
        name: name of the library.
        fakes: names of the library's ops in ``torch.ops.shadowkv_cuda`` that return nothing and write to their
            arguments. They get fake implementations.
        capability: the only compute capability that the library runs on; None for all from ``OLDEST_CAPABILITY`` on.
    """
    if reasons := gpu_missing(OLDEST_CAPABILITY):
        return reasons
    present = torch.cuda.get_device_capability()
    if capability not in (None, present):
        return [f"compute capability {dotted(present)} is not {dotted(capability or present)}"]
    if torch_version() < OLDEST_TORCH:
        return [Unbuilt(f"CUDA ops need torch {dotted(OLDEST_TORCH)} or later, this is {torch.__version__}")]
    path, built, driver = CUDA_FOLDER / f"{name}.so", built_with(), cuda_of_driver()
    if not path.exists():
        return [Unbuilt("not built")]
    if built is not None and driver is not None and driver[0] < int(built.partition(".")[0]):
        return [Unbuilt(f"built with CUDA {built}, but the driver supports only CUDA {dotted(driver)}")]
    if _has_changed(name):
        return [Unbuilt(f"{path.name} was built from sources that have changed since")]
    return _load(path, "shadowkv_cuda", dict.fromkeys(fakes, lambda *_: None))


def dotted(version: tuple[int, ...]) -> str:
    """Formats a version: ``9.0`` for (9, 0)."""
    return ".".join(map(str, version))
