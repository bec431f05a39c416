"""FlashInfer's and flash-attn's functions in PyTorch, as their documentation describes them, so that calls of them can
be tested on any machine. Parameters have the libraries' names, order and defaults."""

from __future__ import annotations

import math
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def softmax_over(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int, right: int = -1, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of q [n, H_q, d], the last n of m positions, over k, v [m, H, d] from ``left`` before each position to
    ``right`` after it, -1 for all: out [n, H_q, d] and log-sum-exps [n, H_q] to base e."""
    (n, heads, dim), m = q.shape, len(k)
    keys, values = (x.repeat_interleave(heads // x.shape[1], 1).double() for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.double(), keys) * (dim**-0.5 if scale is None else scale)
    distance = torch.arange(m) - (torch.arange(n)[:, None] + m - n)
    hidden = torch.zeros(n, m, dtype=torch.bool)
    if causal:
        hidden |= distance > 0
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    scores = scores.masked_fill(hidden, -math.inf)
    total = scores.logsumexp(-1)
    out = torch.einsum("hnm,mhd->nhd", (scores - total[..., None]).exp().nan_to_num(), values)
    return out.to(q.dtype), total.T.float()


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
) -> Any:  # fmt: skip
    """[B, n, H_q, d] over [B, m, H, d]; log-sum-exps are [B, H_q, n], to base e."""
    assert (dropout_p, softcap, alibi_slopes) == (0.0, 0.0, None)
    assert q.shape[0] == k.shape[0] == v.shape[0] and k.shape == v.shape and q.shape[2] % k.shape[2] == 0
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    each = [softmax_over(*x, causal, *window_size, softmax_scale) for x in zip(q, k, v)]
    out, sums = (torch.stack(part) for part in zip(*each))
    return (out, sums.transpose(1, 2).contiguous(), q.new_empty(0)) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False, block_table=None,
) -> Any:  # fmt: skip
    """Packed sequences [T, H_q, d] over [T, H, d], which start at int32 [S + 1]."""
    assert (dropout_p, softcap, alibi_slopes, block_table, return_attn_probs) == (0.0, 0.0, None, None, False)
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    queries, keys = (x.diff().tolist() for x in (cu_seqlens_q, cu_seqlens_k))
    assert isinstance(max_seqlen_q, int) and max_seqlen_q >= max(queries) and max_seqlen_k >= max(keys)
    parts = zip(q.split(queries), k[: sum(keys)].split(keys), v[: sum(keys)].split(keys))
    return torch.cat([softmax_over(*each, causal, *window_size, softmax_scale)[0] for each in parts])


def single_prefill_with_kv_cache(
    q: Tensor, k: Tensor, v: Tensor, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None,
    packed_custom_mask=None, causal=False, kv_layout="NHD", pos_encoding_mode="NONE", use_fp16_qk_reduction=False,
    sm_scale=None, window_left=-1, logits_soft_cap=None, rope_scale=None, rope_theta=None, backend="auto",
    return_lse=False, kv_cache_sf=None, k_scale=None, v_scale=None,
) -> Any:  # fmt: skip
    """[n, H_q, d] over [m, H, d], or [H, m, d] in the layout HND; log-sum-exps are [n, H_q], to base 2."""
    assert (custom_mask, packed_custom_mask, pos_encoding_mode, logits_soft_cap) == (None, None, "NONE", None)
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    assert k.shape == v.shape and q.shape[1] % k.shape[1] == 0
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    out, sums = softmax_over(q, k, v, causal, window_left, scale=sm_scale)
    return (out, sums / math.log(2)) if return_lse else out


class BatchPrefillWithRaggedKVCacheWrapper:
    """Plans once on the host, for calls with the same lengths."""

    planned = 0

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        kv_indptr_buf=None, custom_mask_buf=None, mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
        variant_owns_mask=False,
    ) -> None:  # fmt: skip
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None,
        custom_mask=None, packed_custom_mask=None, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False,
        window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None, q_data_type="float16",
        kv_data_type=None, o_data_type=None,
    ) -> None:  # fmt: skip
        assert qo_indptr.device.type == kv_indptr.device.type == "cpu", "others are waited for"
        assert qo_indptr.dtype == kv_indptr.dtype == torch.int32
        self.lengths = qo_indptr.diff().tolist(), kv_indptr.diff().tolist()
        self.shape = num_qo_heads, num_kv_heads, head_dim_qk, q_data_type, kv_data_type or q_data_type
        self.options = causal, window_left
        type(self).planned += 1

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert (q.shape[1], k.shape[1], q.shape[2], q.dtype, k.dtype) == self.shape
        queries, keys = self.lengths
        parts = zip(q.split(queries), k[: sum(keys)].split(keys), v[: sum(keys)].split(keys))
        return torch.cat([softmax_over(*each, *self.options)[0] for each in parts])


class BatchDecodeWithPagedKVCacheWrapper:
    """Plans once on the host, for one query of each sequence over its pages."""

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
    ) -> None:  # fmt: skip
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "HND" and use_tensor_cores

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads, num_kv_heads, head_dim, page_size,
        q_data_type=None, kv_data_type=None,
    ) -> None:  # fmt: skip
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        self.pages = [indices[a:b].long() for a, b in pairwise(indptr.tolist())]
        self.lengths = [(len(own) - 1) * page_size + last for own, last in zip(self.pages, last_page_len.tolist())]
        self.shape = num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type, kv_data_type

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        k, v = paged_kv_cache
        assert self.shape == (q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.dtype, k.dtype)
        outs = []
        for query, page_ids, length in zip(q, self.pages, self.lengths):
            rows = (x[page_ids].transpose(1, 2).flatten(0, 1)[:length] for x in (k, v))
            outs.append(softmax_over(query[None], *rows, False, -1)[0])
        return torch.cat(outs)


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, block_table=None,
) -> Tensor:  # fmt: skip
    """Queries [B, n, H_q, d] over pages [N, P, H, d] by page ids int32 [B, E]; P is a multiple of 256."""
    assert block_table.dtype == cache_seqlens.dtype == torch.int32 and k_cache.shape[1] % 256 == 0
    outs = []
    for queries, page_ids, length in zip(q, block_table, cache_seqlens.tolist()):
        rows = (x[page_ids.long()].flatten(0, 1)[:length] for x in (k_cache, v_cache))
        outs.append(softmax_over(queries, *rows, False, -1)[0])
    return torch.stack(outs)


STUBS = {
    "flashinfer": (
        *(single_prefill_with_kv_cache, BatchPrefillWithRaggedKVCacheWrapper),
        BatchDecodeWithPagedKVCacheWrapper,
    ),
    "flash_attn": (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache),
}


def stub(name: str) -> ModuleType:
    """A module that stands in for the library ``name``."""
    module = ModuleType(name)
    for function in STUBS[name]:
        setattr(module, function.__name__, function)
    return module
