"""The causal convolution, the gated delta rule and Mamba-2's state space model in PyTorch.

The state of the convolution consists of a sequence's last inputs. The state of the rule decays and is corrected at
every token, that of the state space model only decays. Both are computed token by token in a decode step, and in chunks
for a prompt (arXiv:2412.06464, section 3; arXiv:2405.21060, section 6).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from shadowkv.ops.recurrence import CHUNK, Spans, in_order, in_spans


def causal_convolution(x: Tensor, weight: Tensor, states: Tensor, spans: Spans, bias: Tensor | None = None) -> Tensor:
    """Convolves each channel over its newest W inputs and applies SiLU. Writes the states after each span.

    Args:
        x: [T, C], the C channels of T packed tokens.
        weight: [C, W], the weight of the oldest input first, in the dtype of ``x``.
        states: float32 [N, C, W - 1], the last W - 1 inputs of each of N states, oldest first. The rows ``spans.read``
            are read, the rows ``spans.write`` are written.
        spans: where each sequence's tokens and state are.
        bias: [C], added before SiLU, in the dtype of ``x``; None without one.

    Returns:
        [T, C], in the dtype of ``x``.
    """
    if spans.chained:
        return in_order(lambda token, span: causal_convolution(token, weight, states, span, bias), spans, x)
    before = states[spans.read].to(x.dtype)
    if spans.lengths is None:
        window = torch.cat((before, x.unsqueeze(-1)), dim=-1)
        states[spans.write] = window[..., 1:].to(states.dtype)
        convolved = torch.einsum("bcw,cw->bc", window, weight)
        return F.silu(convolved if bias is None else convolved + bias)
    outs = []
    for number, tokens in enumerate(x.split(spans.lengths)):
        window = torch.cat((before[number], tokens.mT), dim=-1)
        states[spans.write[number : number + 1]] = window[:, tokens.shape[0] :].to(states.dtype).unsqueeze(0)
        outs.append(F.conv1d(window.unsqueeze(0), weight.unsqueeze(1), bias, groups=len(weight)).squeeze(0).mT)
    return F.silu(torch.cat(outs))


EPS = 1e-6
"""Added to the squared norm of queries and keys."""


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, states: Tensor, spans: Spans
) -> Tensor:
    """Computes linear attention of packed tokens, and writes the states after their spans.

    For each head and token, with unit vectors q and k, the state S decays to exp(log_decay) S. Then the state's value
    for k is corrected: S += k (beta (v - Sᵀ k))ᵀ. The result is Sᵀ q / sqrt(dk).

    Args:
        q, k: [T, H_k, dk] for T tokens, not normalised. Each of the H_k heads serves H / H_k neighbouring heads of
            ``v``.
        v: [T, H, dv].
        log_decay: float32 [T, H], at most 0.
        beta: float32 [T, H], between 0 and 1.
        states: float32 or bfloat16 [N, H, dk, dv]. Spans start from the rows ``spans.read``. The rows ``spans.write``
            are written. Within a span, a state is float32. A bfloat16 state is rounded after the span's last token.
        spans: the sequences that the tokens belong to, and the rows of their states.

    Returns:
        [T, H, dv], in the dtype of ``v``.
    """
    if spans.lengths is not None:
        return in_chunks(q, k, v, log_decay, beta, states, spans)
    if spans.chained:
        return in_order(
            lambda q, k, v, log_decay, beta, span: gated_delta_rule(q, k, v, log_decay, beta, states, span),
            *(spans, q, k, v, log_decay, beta),
        )
    out, after = _step(*_for_heads(q, k, v), v.float(), log_decay, beta, states[spans.read].float())
    states[spans.write] = after.to(states.dtype)
    return out.to(v.dtype)


def in_chunks(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, states: Tensor, spans: Spans) -> Tensor:
    """Computes prompts, one span after another, and returns [T, H, dv]. Arguments as for ``gated_delta_rule``;
    ``spans.lengths`` is not None."""
    q, k = _for_heads(q, k, v)
    return in_spans(_span_in_chunks, states, spans, q, k, v.float(), log_decay, beta).to(v.dtype)


def _for_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Scales queries and keys to length 1, divides queries by sqrt(dk), and repeats both for each head of values."""
    heads = v.shape[1] // q.shape[1]
    q, k = (_unit(x.float()) for x in (q, k))
    q, k = (x.repeat_interleave(heads, dim=1) for x in (q * q.shape[-1] ** -0.5, k))
    return q, k


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def _step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes one token of each of B sequences. Returns the results [B, H, dv] and the new states [B, H, dk, dv]."""
    state = state * log_decay.exp()[..., None, None]
    known = (k.unsqueeze(-2) @ state).squeeze(-2)
    state = torch.baddbmm(
        state.flatten(0, 1), k.flatten(0, 1).unsqueeze(-1), ((v - known) * beta[..., None]).flatten(0, 1).unsqueeze(-2)
    ).view(state.shape)
    return (q.unsqueeze(-2) @ state).squeeze(-2), state


def _span_in_chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes the tokens [n, H, ...] of one sequence in chunks. Returns the results [n, H, dv] and the state [H, dk,
    dv] after the last token.

    Within a chunk, the corrections of all tokens solve a triangular system (the UT transform, arXiv:2406.06484).
    """
    length = len(q)
    padding = -length % CHUNK
    q, k, v, beta, log_decay = (
        F.pad(x, (0, 0) * (x.dim() - 1) + (0, padding)).unflatten(0, (-1, CHUNK)).transpose(1, 2)  # [n / C, H, C, ...]
        for x in (q, k, v, beta.unsqueeze(-1), log_decay.unsqueeze(-1))
    )
    decay = log_decay.squeeze(-1).cumsum(-1)  # log of the factor by which the state before the chunk has decayed
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).tril()  # log decay from the column's token to the row's
    between = between.exp().tril()
    system = ((beta * k) @ k.mT * between).tril(-1)
    known = beta * k * decay.exp().unsqueeze(-1)
    solved = torch.linalg.solve_triangular(
        system, torch.cat((beta * v, known), dim=-1), upper=False, unitriangular=True
    )
    values, known = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    among = q @ k.mT * between
    q = q * decay.exp().unsqueeze(-1)
    last = decay[..., -1:]
    k = k * (last - decay).exp().unsqueeze(-1)
    kept = last.exp().unsqueeze(-1)
    outs = []
    for chunk in range(len(q)):
        corrected = values[chunk] - known[chunk] @ state
        outs.append(q[chunk] @ state + among[chunk] @ corrected)
        state = state * kept[chunk] + k[chunk].mT @ corrected
    return torch.stack(outs).transpose(1, 2).flatten(0, 1)[:length], state


def ssd(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, states: Tensor, spans: Spans) -> Tensor:
    """Computes the state space model of Mamba-2 for packed tokens (structured state space duality, SSD,
    arXiv:2405.21060), and writes the states after their spans.

    For each head and token, the state S decays to exp(dt a) S. Then S += b (dt x)ᵀ. The result is Sᵀ c + d x. Names are
    the paper's.

    Args:
        x: [T, H, P] for T tokens and H heads of P dimensions.
        dt: float32 [T, H], the time steps, at least 0.
        a: float32 [H], at most 0.
        b, c: [T, G, N]. Each of the G groups serves H / G neighbouring heads.
        d: float32 [H].
        states: float32 or bfloat16 [R, H, N, P]. Spans start from the rows ``spans.read``. The rows ``spans.write`` are
            written. Within a span, a state is float32. A bfloat16 state is rounded after the span's last token.
        spans: the sequences that the tokens belong to, and the rows of their states.

    Returns:
        [T, H, P], in the dtype of ``x``.
    """
    if spans.lengths is not None:
        return ssd_in_chunks(x, dt, a, b, c, d, states, spans)
    if spans.chained:
        return in_order(lambda x, dt, b, c, span: ssd(x, dt, a, b, c, d, states, span), spans, x, dt, b, c)
    wide, heads = x.float(), x.shape[1] // b.shape[1]
    b, c = (one.float().repeat_interleave(heads, dim=1) for one in (b, c))
    state = states[spans.read].float() * (dt * a).exp()[..., None, None]
    state = state + b.unsqueeze(-1) * (dt.unsqueeze(-1) * wide).unsqueeze(-2)
    states[spans.write] = state.to(states.dtype)
    return ((c.unsqueeze(-2) @ state).squeeze(-2) + d.unsqueeze(-1) * wide).to(x.dtype)


def ssd_in_chunks(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, states: Tensor, spans: Spans
) -> Tensor:
    """Computes prompts, one span after another, and returns [T, H, P]. Arguments as for ``ssd``; ``spans.lengths`` is
    not None."""
    wide = x.float()
    out = in_spans(partial(_ssd_of_span, a), states, spans, wide, dt, b.float(), c.float())
    return (out + d.unsqueeze(-1) * wide).to(x.dtype)


def _ssd_of_span(a: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the tokens [n, H, ...] of one sequence in chunks. Returns the results [n, H, P], without d x, and the
    state [H, N, P] after the last token.

    The heads of a group are columns of one product, because they share b and c.
    """
    length, groups, heads = len(x), b.shape[1], x.shape[1] // b.shape[1]
    padding = -length % CHUNK
    x, dt, b, c = (
        F.pad(one, (0, 0) * (one.dim() - 1) + (0, padding)).unflatten(0, (-1, CHUNK)).transpose(1, 2)
        for one in (x.unflatten(1, (groups, heads)), dt.unflatten(1, (groups, heads)), b, c)
    )  # [n / C, G, C, ...]
    # The log of the factor by which the state before the chunk has decayed.
    decay = (dt * a.view(groups, 1, heads)).cumsum(2)
    between = (decay.mT.unsqueeze(-1) - decay.mT.unsqueeze(-2)).tril()  # from the column's token to the row's
    inputs = dt.unsqueeze(-1) * x
    within = ((c @ b.mT).unsqueeze(2) * between.exp().tril()) @ inputs.transpose(2, 3)  # [n / C, G, H / G, C, P]
    last = decay[:, :, -1:]
    kept, factor = last.exp().unsqueeze(-1), decay.exp().unsqueeze(-1)
    inputs = (inputs * (last - decay).exp().unsqueeze(-1)).flatten(-2)
    state = state.unflatten(0, (groups, heads)).transpose(1, 2)  # [G, N, H / G, P]
    outs = []
    for chunk in range(len(x)):
        before = (c[chunk] @ state.flatten(-2)).unflatten(-1, state.shape[2:])
        outs.append(before * factor[chunk] + within[chunk].transpose(1, 2))
        state = state * kept[chunk] + (b[chunk].mT @ inputs[chunk]).unflatten(-1, state.shape[2:])
    out = torch.stack(outs).transpose(1, 2).flatten(0, 1)[:length]
    return out.flatten(1, 2), state.transpose(1, 2).flatten(0, 1)
