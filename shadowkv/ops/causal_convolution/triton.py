"""The causal convolution in one Triton launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.recurrence import CHUNK, Spans

CHANNELS = {False: 64, True: 256}
"""Channels per program, by whether every span is one token (a decode step)."""


def causal_convolution(x: Tensor, weight: Tensor, states: Tensor, spans: Spans) -> Tensor:
    """Same as the reference. The channels of a token in ``x`` and each row of ``states`` are contiguous. Sums and SiLU
    are float32.

    Calls without ``spans.lengths`` can be captured in a CUDA graph.
    """
    (tokens, channels), (_, width) = x.shape, weight.shape
    out = x.new_empty(x.shape)
    if not tokens:
        return out
    step = spans.lengths is None
    chunks, starts = (spans.read, spans.read) if step else (spans.chunks, spans.starts)  # a step reads neither
    _convolve[(tokens if step else len(chunks), triton.cdiv(channels, CHANNELS[step]))](
        x, weight.contiguous(), states, chunks, starts, spans.read, spans.write, out, channels, x.stride(0),
        states.stride(0), STEP=step, WIDTH=width, HELD=triton.next_power_of_2(width - 1),
        TOKENS=1 if step else CHUNK, CHANNELS=CHANNELS[step],
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["chunks", "starts", "read", "write"])
def _convolve(
    x, weight, states, chunks, starts, read, write, out, channels, x_token, state_row,
    STEP: tl.constexpr, WIDTH: tl.constexpr, HELD: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Convolves one chunk of a span. The program of a span's first chunk also writes the new state, because it is the
    only one that reads the old state."""
    part = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    if STEP:
        span, chunk, start, length = part, part * 0, part, part * 0 + 1
    else:
        span, chunk = tl.load(chunks + 2 * part), tl.load(chunks + 2 * part + 1)
        start = tl.load(starts + span)
        length = tl.load(starts + span + 1) - start
    before = states + tl.load(read + span) * state_row + channel * (WIDTH - 1)
    position = chunk * TOKENS + tl.arange(0, TOKENS)[:, None]
    there = (position < length) & (channel < channels)
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
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
def _inputs(x, before, start, position, channel, there, x_token, WIDTH: tl.constexpr):
    """Loads the inputs at positions of a span. Positions below 0 come from the state."""
    new = tl.load(x + (start + position) * x_token + channel, mask=there & (position >= 0), other=0.0)
    old = tl.load(before + position + WIDTH - 1, mask=there & (position < 0), other=0.0)
    return new.to(tl.float32) + old
