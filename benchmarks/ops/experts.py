"""Both matrix products of a layer's experts: in bfloat16 by each kernel, and in every format that stays quantized on a
GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.ops.timing import READ_SPEED, Row, bench, microseconds
from shadowkv.layers.quantized_matrix import QuantizedMatrix, RowBlock
from shadowkv.models.checkpoints.quantized.registry import SHAPES
from shadowkv.models.filling import fill_random
from shadowkv.ops.grouped_matmul import cuda
from shadowkv.ops.grouped_matmul.triton import multiply_in_tiles
from shadowkv.ops.grouped_quantized_matmul import humming, reference
from shadowkv.ops.quantized_matmul.humming import compile_kernels

TOKENS = (1, 4, 16, 64, 512, 1024, 2048, 4096)
ROUTINGS = 16
"""Number of random choices of experts that are timed one after another. The few experts of one choice would stay in the
L2 cache."""


class Layer(NamedTuple):
    """Number of experts of a layer, number of experts per token, and the sizes of an expert's matrices."""

    experts: int
    per_token: int
    hidden: int
    inner: int


LAYERS = {"qwen3-30b-a3b": Layer(128, 8, 2048, 768), "gpt-oss-20b": Layer(32, 4, 2880, 2880)}
CASES = [
    *(("qwen3-30b-a3b", form) for form in ("bfloat16", "gptq", "awq", "mxfp4", "nvfp4", "fp8-block")),
    *(("gpt-oss-20b", form) for form in ("bfloat16", "mxfp4")),
]

Product = Callable[[Tensor, Tensor], Tensor]


def product(form: str, experts: int, rows: int, columns: int) -> tuple[Product, Product, int]:
    """Returns the product with random matrices, the reference's product with the same matrices, and the bytes that are
    read per expert."""
    device = torch.device("cuda")
    if form == "bfloat16":
        plain = torch.randn(experts, rows, columns, device=device, dtype=torch.bfloat16).mul_(columns**-0.5)
        looped = plain.view(-1, columns)
        return (
            lambda x, offsets: cuda.grouped_matmul(x, plain, offsets),
            lambda x, offsets: reference.grouped_quantized_matmul(x, [looped], offsets),
            plain.nbytes // experts,
        )
    matrix = QuantizedMatrix(columns, [RowBlock(experts * rows, SHAPES[form])], dtype=torch.bfloat16, device=device)
    fill_random(matrix, torch.Generator(device).manual_seed(0))
    stored = [*matrix.stored(0, matrix.num_rows)]
    packed = matrix.pack_experts(experts)
    compile_kernels([packed])
    return (
        lambda x, offsets: humming.grouped_quantized_matmul(x, packed, offsets),
        lambda x, offsets: reference.grouped_quantized_matmul(x, stored, offsets),
        sum(tensor.nbytes for name, tensor in packed.tensors.items() if name != "locks") // experts,
    )


def routed(layer: Layer, tokens: int) -> Tensor:
    """Returns the experts' offsets for a random choice of different experts for each token. All experts are equally
    likely."""
    chosen = torch.rand(tokens, layer.experts, device="cuda").topk(layer.per_token).indices
    counts = chosen.flatten().bincount(minlength=layer.experts)
    return torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()


@bench(list(LAYERS), lambda: torch.cuda.is_available() and not cuda.missing())
def grouped_matmul(model: str) -> list[Row]:
    """A row for each number of tokens, in bfloat16: microseconds of the Triton kernel, of PyTorch's kernel, and of only
    reading the weights of the experts that have tokens."""
    layer, found = LAYERS[model], list[Row]()
    shapes = ((2 * layer.inner, layer.hidden), (layer.hidden, layer.inner))
    weights = [torch.randn(layer.experts, *shape, device="cuda").mul_(shape[1] ** -0.5).bfloat16() for shape in shapes]
    for tokens in TOKENS:
        routings, row = [routed(layer, tokens) for _ in range(ROUTINGS)], dict.fromkeys(("triton", "pytorch"), 0.0)
        for weight in weights:
            x = torch.randn(tokens * layer.per_token, weight.shape[2], device="cuda").bfloat16()
            ways = {
                "triton": partial(multiply_in_tiles, x, weight),
                "pytorch": lambda offsets, x=x, weight=weight: F.grouped_mm(x, weight.mT, offs=offsets[1:]),
            }
            expected = ways["pytorch"](routings[0])
            bound = 2e-2 * float(expected.abs().amax())
            torch.testing.assert_close(ways["triton"](routings[0]), expected, rtol=2e-2, atol=bound)
            for name, way in ways.items():
                row[name] += microseconds([partial(way, offsets) for offsets in routings])
        touched = sum(int((offsets.diff() > 0).sum()) for offsets in routings) / ROUTINGS
        read = touched / layer.experts * sum(weight.nbytes for weight in weights) / READ_SPEED * 1e6
        row = {name: round(taken, 1) for name, taken in row.items()}
        found.append({"model": model, "tokens": tokens, "experts": round(touched, 1), **row, "read": round(read, 1)})
    return found


@bench(CASES, lambda: not humming.missing())
def grouped_quantized_matmul(case: tuple[str, str]) -> list[Row]:
    """A row for each number of tokens: the number of experts that have tokens, these experts' bytes, and the speed of
    reading them as a share of the measured memory speed."""
    model, form = case
    layer = LAYERS[model]
    gate_up, gate_up_looped, first = product(form, layer.experts, 2 * layer.inner, layer.hidden)
    down, down_looped, second = product(form, layer.experts, layer.hidden, layer.inner)
    found = list[Row]()

    def both(x: Tensor, inner: Tensor, offsets: Tensor) -> None:
        gate_up(x, offsets)
        down(inner, offsets)

    for tokens in TOKENS:
        rows = tokens * layer.per_token
        x = torch.randn(rows, layer.hidden, device="cuda").bfloat16()
        inner = torch.randn(rows, layer.inner, device="cuda").bfloat16()
        routings = [routed(layer, tokens) for _ in range(ROUTINGS)]
        for ours, looped, given in ((gate_up, gate_up_looped, x), (down, down_looped, inner)):
            expected = looped(given, routings[0])
            torch.testing.assert_close(
                ours(given, routings[0]), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().amax())
            )
        took = microseconds([partial(both, x, inner, offsets) for offsets in routings])
        touched = sum(int((offsets.diff() > 0).sum()) for offsets in routings) / ROUTINGS
        nbytes = touched * (first + second)
        found.append({
            "model": model, "form": form, "tokens": tokens, "experts": round(touched, 1),
            "mib": round(nbytes / 2**20, 1), "us": round(took, 1),
            "share_of_memory_speed": round(nbytes / READ_SPEED / (took * 1e-6), 3),
        })  # fmt: skip
    return found
