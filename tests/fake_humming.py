"""humming-kernels' contract on a CPU: what the library is told of weights, and what its kernels make of it, in PyTorch.

Weights stay in the layout that the library is given: codes in 32-bit words, the lowest bits first. Its kernels' results
for rows that are no expert's, and for what is padded, are NaN here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shadowkv.ops import registry
from shadowkv.ops.quantized.groups import GroupForm
from shadowkv.ops.quantized_matmul import humming

DTYPES = {"bfloat16": torch.bfloat16, "float8e4m3": torch.float8_e4m3fn, "float8e8m0": torch.float8_e8m0fnu}
BITS = {"float4e2m1": 4, "float8e4m3": 8}
KERNELS: list[tuple[dict[str, Any], int]] = []
"""What was compiled: a layer, and the tokens that it was tuned for."""


class LayerConfig:
    """What describes a layer."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def to_str(self) -> str:
        return json.dumps(self.fields, sort_keys=True)


def pack_weight(codes: Tensor, bits: int) -> Tensor:
    """int32 [n, k] -> int32 [n, k bits / 32]."""
    assert codes.dtype == torch.int32 and codes.is_contiguous() and codes.shape[1] % 32 == 0
    places = torch.arange(bits)
    stream = (codes.unsqueeze(-1) >> places & 1).flatten(1).unflatten(1, (-1, 32)).long()
    words = (stream << torch.arange(32)).sum(-1)
    return words.where(words < 2**31, words - 2**32).int()


def unpack_weight(words: Tensor, bits: int) -> Tensor:
    """int32 [n, k bits / 32] -> int64 [n, k]."""
    stream = (words.long().unsqueeze(-1) >> torch.arange(32) & 1).flatten(1).unflatten(1, (-1, bits))
    return (stream << torch.arange(bits)).sum(-1)


def transform(layer: LayerConfig, tensors: dict[str, Tensor], already_padded: bool) -> dict[str, Tensor]:
    """Tensors [n, ...] of n matrices, which have to be padded."""
    fields = layer.fields
    assert already_padded and not fields["num_experts"]
    high, wide, group = fields["shape_n"], fields["shape_k"], fields["weight_scale_group_size"]
    assert wide % (group or 1) == 0
    groups = wide // group if group else 1
    matrices = len(tensors["weight"])
    assert tensors["weight"].shape == (matrices, high, wide * bits_of(fields) // 32)
    assert tensors["weight_scale"].shape == (matrices, high, groups)
    assert tensors["weight_scale"].dtype == DTYPES[fields["bs_dtype"]]
    assert ("zero_point" in tensors) == fields["has_zero_point"]
    factor = {None: None, "tensor": (matrices,), "channel": (matrices, high)}[fields["weight_scale_2_type"]]
    assert factor is None or tensors["weight_scale_2"].shape == factor
    return dict(tensors)


def bits_of(fields: dict[str, Any]) -> int:
    return BITS.get(fields["b_dtype"]) or int(fields["b_dtype"].removeprefix("uint"))


def numbers(
    fields: dict[str, Any], weight: Tensor, scale: Tensor, factor: Tensor | None, zero: Tensor | None
) -> Tensor:
    """float32 [N, K] of one matrix."""
    bits = bits_of(fields)
    codes = unpack_weight(weight, bits)
    if fields["b_dtype"].startswith("float"):
        element = {"float4e2m1": "e2m1", "float8e4m3": "e4m3"}[fields["b_dtype"]]
        packed = (codes[:, ::2] | codes[:, 1::2] << 4 if bits == 4 else codes).to(torch.uint8)
        packed = packed if bits == 4 else packed.view(torch.float8_e4m3fn)
        values = GroupForm(element, None, torch.float32).unpack((packed, torch.ones(len(packed), 1)))
    else:
        values = codes.float()
    each = fields["weight_scale_group_size"] or fields["shape_k"]
    middle = torch.full_like(scale.float(), 2.0 ** (bits - 1) if fields["b_dtype"].startswith("uint") else 0.0)
    values = values - (middle if zero is None else zero.float()).repeat_interleave(each, 1)
    values = values * scale.float().repeat_interleave(each, 1)
    values = values if factor is None else values * factor.float().view(-1, 1)
    return values[: len(values) - fields["pad_shape_n"], : values.shape[1] - fields["pad_shape_k"]]


def launch_kernel(
    configs: Tensor, a: Tensor, b: Tensor, bs: Tensor, bs2: Tensor | None, as_: None, as2: None, bzp: Tensor | None,
    bias: None, c: None, sorted_ids: None, expert_ids: None, num_tokens_padded: None, expert_layout: Tensor | None,
    locks: Tensor, top_k: int, valid_shape_m: int, should_check_tensor: bool = True,
) -> Tensor:  # fmt: skip
    """The kernel of so many tokens, which are sorted by expert where the layer has any."""
    assert locks.dtype == torch.int32 and not locks.any() and (top_k, valid_shape_m) == (1, 0)
    (number,) = (number for low, high, number, _ in configs.view(-1, 4).tolist() if low < len(a) <= high)
    fields, _ = KERNELS[number]
    experts = fields["num_experts"]
    assert (expert_layout is not None) == (experts > 0)
    out = torch.full((len(a), fields["shape_n"] - fields["pad_shape_n"]), torch.nan, dtype=torch.bfloat16)
    if expert_layout is None:
        return out.copy_(a.float() @ numbers(fields, b, bs, bs2, bzp).T)
    assert expert_layout.shape == (experts + 1,) and expert_layout.dtype == torch.int32
    assert expert_layout[0] == 0 and int(expert_layout[-1]) <= len(a)
    assert b.shape[0] == bs.shape[0] == experts and (bs2 is None or bs2.shape[0] == experts)
    for expert in range(experts):
        start, end = expert_layout[expert : expert + 2].tolist()
        if end > start:
            one = (None if tensor is None else tensor[expert] for tensor in (bs2, bzp))
            out[start:end] = (a[start:end].float() @ numbers(fields, b[expert], bs[expert], *one).T).bfloat16()
    return out


def compiled(gemm_type: str, **fields: Any) -> SimpleNamespace:
    """A kernel."""
    tokens = fields.pop("tuned_for")
    assert gemm_type == ("grouped_contiguous" if fields["num_experts"] else "dense")
    if fields["num_experts"]:  # or they read offsets before these are written
        assert fields.pop("use_pdl") is False
    KERNELS.append((fields, tokens))
    return SimpleNamespace(kernel_id=len(KERNELS) - 1)


@contextmanager
def installed() -> Iterator[None]:
    """The library is there, and CPUs are multiplied for by its ops."""
    library = {
        "humming": {"ops": SimpleNamespace(pack_weight=pack_weight)},
        "humming.config": {"LayerConfig": LayerConfig},
        "humming.transform": {"transform_humming_tensors": transform},
        "humming.tune": {"get_heuristics_config": lambda layer, shape_m, gemm_type, device: {"tuned_for": shape_m}},
        "humming.kernel.humming": {"HummingKernel": compiled},
        "humming.utils.cpu": {"get_parallel_build_workers": lambda: 1},
        "humming.utils.nvrtc": {"get_nvrtc_library_path": lambda: "/usr/lib/libnvrtc.so"},
    }
    names = {*library, "humming.kernel", "humming.utils"}
    ops = torch.library.Library("humming", "FRAGMENT")
    optional = "Tensor? bs2, Tensor? as_, Tensor? as2, Tensor? bzp, Tensor? bias, Tensor? c, Tensor? sorted_ids, "
    optional += "Tensor? expert_ids, Tensor? num_tokens_padded, Tensor? expert_layout, Tensor? locks"
    rest = "SymInt top_k, SymInt valid_shape_m, bool should_check_tensor = True"
    ops.define(f"launch_kernel(Tensor configs, Tensor a, Tensor b, Tensor bs, {optional}, {rest}) -> Tensor")
    ops.impl("launch_kernel", launch_kernel, "CPU")
    cached = (humming._kernels, humming._kernel, humming._let_the_compiler_find_its_parts)
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            module = ModuleType(name)
            vars(module).update(library.get(name, {}))
            patch.setitem(sys.modules, name, module)
        patch.setenv("LD_LIBRARY_PATH", "")
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        for op in ("quantized_matmul", "grouped_quantized_matmul"):
            patch.setattr(f"shadowkv.ops.{op}.humming.missing", lambda: [])
        patch.setitem(registry.PREFERENCE, "cpu", ("humming", "cpu", "reference"))
        for function in cached:
            function.cache_clear()
        try:
            yield
        finally:
            KERNELS.clear()
            ops._destroy()
            for function in cached:
                function.cache_clear()
