"""The causal convolution in one Triton launch, and decode steps of the gated delta rule and of Mamba-2's state space
model, in which one launch reads and writes each state once. For prompts, the two are computed in PyTorch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.linear_attention.reference import EPS, in_chunks, ssd_in_chunks
from shadowkv.ops.recurrence import CHUNK, Spans

CHANNELS = {False: 64, True: 256}
"""Channels per program. The key says whether every span is one token (a decode step)."""


def causal_convolution(x: Tensor, weight: Tensor, states: Tensor, spans: Spans, bias: Tensor | None = None) -> Tensor:
    """Same as the reference. The channels of a token in ``x`` and each row of ``states`` are contiguous. Sums and SiLU
    are float32.

    Calls without ``spans.lengths`` can be captured in a CUDA graph.
    """
    (tokens, channels), (_, width) = x.shape, weight.shape
    out = x.new_empty(x.shape)
    if not tokens:
        return out
    step = spans.lengths is None
    chunks, starts = (spans.read, spans.read) if step else (spans.chunks, spans.starts)  # a step reads neither of them
    _convolve[(tokens if step else len(chunks), triton.cdiv(channels, CHANNELS[step]))](
        x, weight.contiguous(), bias, states, chunks, starts, spans.read, spans.write, out, channels, x.stride(0),
        states.stride(0), STEP=step, CHAINED=spans.chained, WIDTH=width, HELD=triton.next_power_of_2(width - 1),
        TOKENS=1 if step else CHUNK, CHANNELS=CHANNELS[step],
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["chunks", "starts", "read", "write"])
def _convolve(
    x, weight, bias, states, chunks, starts, read, write, out, channels, x_token, state_row,
    STEP: tl.constexpr, CHAINED: tl.constexpr, WIDTH: tl.constexpr, HELD: tl.constexpr, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Convolves one chunk of a span. The program of a span's first chunk also writes the new state, because no other
    program reads the old state. The tokens of a chain (``Spans.chained``) need not wait for each other, because all of
    them read the state before the chain."""
    part = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    if STEP:
        span, chunk, start = part, part * 0, part
        if CHAINED:
            while _follows(read, write, start, start > 0):
                start -= 1
        length = part - start + 1
        position = part - start + tl.zeros([1, 1], tl.int64)
        before = states + tl.load(read + start) * state_row + channel * (WIDTH - 1)
    else:
        span, chunk = tl.load(chunks + 2 * part), tl.load(chunks + 2 * part + 1)
        start = tl.load(starts + span)
        length = tl.load(starts + span + 1) - start
        position = chunk * TOKENS + tl.arange(0, TOKENS)[:, None]
        before = states + tl.load(read + span) * state_row + channel * (WIDTH - 1)
    there = (position < length) & (channel < channels)
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)
    for i in tl.static_range(WIDTH):
        weights = tl.load(weight + channel * WIDTH + i, mask=channel < channels, other=0.0).to(tl.float32)
        total += weights * _inputs(x, before, start, position + i - (WIDTH - 1), channel, there, x_token, WIDTH)
    place = out + (start + position) * channels + channel
    tl.store(place, (total * tl.sigmoid(total)).to(out.dtype.element_ty), mask=there)
    if chunk == 0:
        held = tl.arange(0, HELD)[:, None]
        kept = (held < WIDTH - 1) & (channel < channels)
        newest = _inputs(x, before, start, length + held - (WIDTH - 1), channel, kept, x_token, WIDTH)
        tl.debug_barrier()  # no thread may write what another thread has yet to read
        tl.store(states + tl.load(write + span) * state_row + channel * (WIDTH - 1) + held, newest, mask=kept)


@triton.jit
def _follows(read, write, token, there):
    """Whether a token follows the one before it in a chain (``Spans.chained``). ``there`` is whether both exist."""
    before, row = tl.load(write + token - 1, mask=there, other=-1), tl.load(read + token, mask=there, other=-2)
    return (row == before) & (row != tl.load(write + token, mask=there, other=-2))


@triton.jit
def _inputs(x, before, start, position, channel, there, x_token, WIDTH: tl.constexpr):
    """Loads the inputs at positions of a span. Positions below 0 come from the state."""
    new = tl.load(x + (start + position) * x_token + channel, mask=there & (position >= 0), other=0.0)
    old = tl.load(before + position + WIDTH - 1, mask=there & (position < 0), other=0.0)
    return new.to(tl.float32) + old


COLUMNS = 32
"""Maximum number of a state's columns that a program holds in registers."""

NUMBERS_PER_WARP = 1024
"""Minimum number of values of a state per warp. With fewer, several threads would load the same value, and one of them
could load it after another had overwritten it."""


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, states: Tensor, spans: Spans
) -> Tensor:
    """Same as the reference. The last dimension of ``q``, ``k`` and ``v`` is contiguous, and so is each row of
    ``states``.

    Decode steps can be captured in a CUDA graph.
    """
    if spans.lengths is not None:
        return in_chunks(q, k, v, log_decay, beta, states, spans)
    return step(q, k, v, log_decay, beta, states, spans)


def step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, states: Tensor, spans: Spans) -> Tensor:
    """Computes a decode step, in which every span is one token, and returns [T, H, dv]. Arguments as for
    ``gated_delta_rule``."""
    (tokens, heads, size), key_size = v.shape, q.shape[-1]
    out = v.new_empty(v.shape)
    if not tokens:
        return out
    rows, columns = triton.next_power_of_2(key_size), min(COLUMNS, triton.next_power_of_2(size))
    _step[(tokens, heads, triton.cdiv(size, columns))](
        q, k, v, log_decay.contiguous(), beta.contiguous(), states, spans.read, spans.write, out,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], states.stride(0), tokens, heads, EPS, CHAINED=spans.chained,
        GROUP=heads // q.shape[1], KEY_SIZE=key_size, ROWS=rows, SIZE=size, COLUMNS=columns,
        num_warps=max(1, min(4, rows * columns // NUMBERS_PER_WARP)),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["log_decay", "beta", "read", "write"])
def _step(
    q, k, v, log_decay, beta, states, read, write, out, q_token, q_head, k_token, k_head, v_token, v_head,
    state_row, tokens, heads, eps, CHAINED: tl.constexpr,
    GROUP: tl.constexpr, KEY_SIZE: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Computes one token. With ``CHAINED``, the program of a chain's first token computes all tokens of the chain."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column = tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    place = head.to(tl.int64) * (KEY_SIZE * SIZE) + row[:, None] * SIZE + column[None, :]
    there = (row < KEY_SIZE)[:, None] & (column < SIZE)[None, :]
    count, reads = 1, there
    if CHAINED:
        count = _chain(read, write, token, tokens)
        reads = there & (row < KEY_SIZE * tl.minimum(count, 1))[:, None]
    state = tl.load(states + tl.load(read + token) * state_row + place, mask=reads, other=0.0).to(tl.float32)
    for _ in range(count):
        query = _unit(q + token * q_token + head // GROUP * q_head, row, eps, KEY_SIZE) / tl.sqrt(KEY_SIZE * 1.0)
        key = _unit(k + token * k_token + head // GROUP * k_head, row, eps, KEY_SIZE)
        value = tl.load(v + token * v_token + head * v_head + column, mask=column < SIZE, other=0.0).to(tl.float32)
        gate = token * heads + head
        state *= tl.exp(tl.load(log_decay + gate))
        known = tl.sum(key[:, None] * state, axis=0)
        state += key[:, None] * ((value - known) * tl.load(beta + gate))[None, :]
        tl.store(states + tl.load(write + token) * state_row + place, state.to(states.dtype.element_ty), mask=there)
        result = tl.sum(query[:, None] * state, axis=0)
        tl.store(out + gate * SIZE + column, result.to(out.dtype.element_ty), mask=column < SIZE)
        state = state.to(states.dtype.element_ty).to(tl.float32)  # rounded, as the next step would read it
        token += 1


@triton.jit
def _chain(read, write, token, tokens):
    """Returns the number of tokens of the chain that begins at a token. Returns 0 if the chain begins at an earlier
    token."""
    count = 1 - _follows(read, write, token, token > 0).to(tl.int64)
    while _follows(read, write, token + count, (count > 0) & (token + count < tokens)):
        count += 1
    return count


@triton.jit
def _unit(x, i, eps, SIZE: tl.constexpr):
    """Loads a row of ``SIZE`` numbers and scales it to length 1."""
    wide = tl.load(x + i, mask=i < SIZE, other=0.0).to(tl.float32)
    return wide * tl.rsqrt(tl.sum(wide * wide, axis=0) + eps)


def ssd(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, states: Tensor, spans: Spans) -> Tensor:
    """Same as the reference. The last dimension of ``x``, ``b`` and ``c`` is contiguous, and so is each row of
    ``states``.

    Decode steps can be captured in a CUDA graph.
    """
    if spans.lengths is not None:
        return ssd_in_chunks(x, dt, a, b, c, d, states, spans)
    return ssd_step(x, dt, a, b, c, d, states, spans)


def ssd_step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, states: Tensor, spans: Spans) -> Tensor:
    """Computes a decode step, in which every span is one token, and returns [T, H, P]. Arguments as for ``ssd``."""
    (tokens, heads, size), (_, groups, state_size) = x.shape, b.shape
    out = x.new_empty(x.shape)
    if not tokens:
        return out
    rows, columns = triton.next_power_of_2(state_size), min(COLUMNS, triton.next_power_of_2(size))
    _ssd_step[(tokens, heads, triton.cdiv(size, columns))](
        x, dt.contiguous(), a, b, c, d, states, spans.read, spans.write, out, *x.stride()[:2], *b.stride()[:2],
        *c.stride()[:2], states.stride(0), tokens, heads, CHAINED=spans.chained, GROUP=heads // groups,
        STATE_SIZE=state_size, ROWS=rows, SIZE=size, COLUMNS=columns,
        num_warps=max(1, min(4, rows * columns // NUMBERS_PER_WARP)),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["dt", "read", "write"])
def _ssd_step(
    x, dt, a, b, c, d, states, read, write, out, x_token, x_head, b_token, b_group, c_token, c_group, state_row, tokens,
    heads, CHAINED: tl.constexpr, GROUP: tl.constexpr, STATE_SIZE: tl.constexpr, ROWS: tl.constexpr,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Computes one token. With ``CHAINED``, the program of a chain's first token computes all tokens of the chain."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column = tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    place = head.to(tl.int64) * (STATE_SIZE * SIZE) + row[:, None] * SIZE + column[None, :]
    there = (row < STATE_SIZE)[:, None] & (column < SIZE)[None, :]
    count, reads = 1, there
    if CHAINED:
        count = _chain(read, write, token, tokens)
        reads = there & (row < STATE_SIZE * tl.minimum(count, 1))[:, None]
    state = tl.load(states + tl.load(read + token) * state_row + place, mask=reads, other=0.0).to(tl.float32)
    rate, skip = tl.load(a + head), tl.load(d + head)
    for _ in range(count):
        own, group, step = token * heads + head, head // GROUP, tl.load(dt + token * heads + head)
        value = tl.load(x + token * x_token + head * x_head + column, mask=column < SIZE, other=0.0).to(tl.float32)
        into = tl.load(b + token * b_token + group * b_group + row, mask=row < STATE_SIZE, other=0.0).to(tl.float32)
        out_of = tl.load(c + token * c_token + group * c_group + row, mask=row < STATE_SIZE, other=0.0).to(tl.float32)
        state = state * tl.exp(step * rate) + into[:, None] * (step * value)[None, :]
        tl.store(states + tl.load(write + token) * state_row + place, state.to(states.dtype.element_ty), mask=there)
        result = tl.sum(out_of[:, None] * state, axis=0) + skip * value
        tl.store(out + own * SIZE + column, result.to(out.dtype.element_ty), mask=column < SIZE)
        state = state.to(states.dtype.element_ty).to(tl.float32)  # rounded, as the next step would read it
        token += 1
