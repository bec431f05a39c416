"""The gated delta rule and Mamba-2's state space model, with the kernels of fla-core
(github.com/fla-org/flash-linear-attention) for prompts. Triton compiles and tunes them on this machine. Decode steps
use our own Triton kernels."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from shadowkv.installation import adding
from shadowkv.ops.case import Case, unless
from shadowkv.ops.extension import gpu_missing
from shadowkv.ops.linear_attention.triton import ssd_step, step
from shadowkv.ops.recurrence import CHUNK, Spans, in_spans

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


def ssd(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, states: Tensor, spans: Spans) -> Tensor:
    """Same as the reference. The last dimension of ``x``, ``b`` and ``c`` is contiguous, and so is each row of
    ``states``.

    For prompts, this is the library's linear attention with a decay for each head (``simple_gla``): ``c`` are the
    queries, ``b`` the keys, dt x the values. Four things are rounded to the dtype of ``x``: dt x, the states between
    chunks, each chunk's contribution to the state, and the result before d x is added. The state accumulates
    contributions in float32. Decode steps can be captured in a CUDA graph.
    """
    if spans.lengths is None:
        return ssd_step(x, dt, a, b, c, d, states, spans)
    # The kernel that computes states needs a key for each head.
    queries, keys = (one.repeat_interleave(x.shape[1] // b.shape[1], dim=1) for one in (c, b))
    # One span after another: with the starts of several, the library would make the host wait for a number of chunks.
    out = in_spans(_simple_gla, states, spans, queries, keys, (dt.unsqueeze(-1) * x).to(x.dtype), dt * a)
    return (out + d.unsqueeze(-1) * x).to(x.dtype)


def _simple_gla(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the tokens [n, H, ...] of one sequence. Returns the results [n, H, dv], and the state [H, dk, dv] after
    the last token."""
    from fla.ops.simple_gla import chunk_simple_gla

    out, after = chunk_simple_gla(
        *(x.unsqueeze(0) for x in (q, k, v, log_decay)),
        scale=1.0,
        initial_state=state.unsqueeze(0),
        output_final_state=True,
    )
    return out.squeeze(0), after.squeeze(0)
