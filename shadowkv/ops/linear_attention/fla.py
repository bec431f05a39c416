"""The gated delta rule, with the kernels of fla-core (github.com/fla-org/flash-linear-attention) for prompts. Triton
compiles and tunes them on this machine. Decode steps use our own Triton kernel."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from shadowkv.installation import adding
from shadowkv.ops.case import Case, unless
from shadowkv.ops.extension import gpu_missing
from shadowkv.ops.linear_attention.triton import step
from shadowkv.ops.recurrence import CHUNK, Spans

MIN_CAPABILITY = (8, 0)
"""Lowest compute capability whose tensor cores have bfloat16."""


def missing() -> list[str]:
    """Returns the reasons why the library cannot be used here; empty if it can be used."""
    installed = find_spec("fla") is not None
    return gpu_missing(MIN_CAPABILITY) + unless(installed, f"fla-core is not installed: {adding('gpu')}")


def supports(case: Case) -> list[str]:
    """Returns why the library cannot serve a case. It takes only 16-bit dtypes, because it multiplies float32 in
    TF32."""
    return unless(case.dtype in (torch.bfloat16, torch.float16), f"{case.dtype} is not of 16 bits")


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, states: Tensor, spans: Spans
) -> Tensor:
    """Same as the reference. The last dimension of ``q``, ``k`` and ``v`` is contiguous, and so is each row of
    ``states``.

    For prompts, the library rounds three things to the dtype of ``v``: the normalised queries and keys, the states
    between chunks, and each chunk's contribution to the state. The state accumulates these contributions in float32.
    Keys have at most 256 dimensions. Decode steps can be captured in a CUDA graph.
    """
    if spans.lengths is None:
        return step(q, k, v, log_decay, beta, states, spans)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out, after = chunk_gated_delta_rule(
        *(x.unsqueeze(0) for x in (q, k, v, log_decay, beta)),
        initial_state=states[spans.read].float(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=spans.starts,
        chunk_indices=spans.chunks,  # without them, the library would copy lengths to the host, which would wait
        chunk_size=CHUNK,
    )
    states[spans.write] = after.to(states.dtype)
    return out.squeeze(0)
