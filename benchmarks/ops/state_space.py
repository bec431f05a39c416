"""Mamba-2's state space model on a GPU, with the shapes of Nemotron 3 Nano: decode steps, and prompts by fla-core and
in PyTorch's chunks.

Counted bytes are x, B, C, the time steps and the results, once, and the states, read and written. An engine launches
prompts of hybrids without CUDA graphs. ``launched us`` is the time of a call that is launched so, behind others: it is
the host's time if the host is slower than the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.ops.timing import Row, against_floor, bench, microseconds
from shadowkv.layers.spec import StateSpace
from shadowkv.models import load_config
from shadowkv.ops.linear_attention import fla, reference, triton
from shadowkv.ops.recurrence import Spans

MODEL = "nemotron-3-nano-30b-a3b"
CASES = [(8192,), (512,) * 16, 64]
"""The lengths of prompts' spans, or the number of rows of a decode step."""

CALLS = 5


def arguments(case: tuple[int, ...] | int) -> tuple[tuple[Tensor, ...], Spans]:
    """Returns the arguments of a call, states included, and its spans."""
    sizes = load_config(MODEL).linear
    assert isinstance(sizes, StateSpace)
    count, lengths = (case, None) if isinstance(case, int) else (len(case), case)
    tokens, device = count if lengths is None else sum(lengths), torch.device("cuda")
    x = torch.randn(tokens, sizes.heads, sizes.head_dim, device=device).bfloat16()
    b, c = torch.randn(2, tokens, sizes.groups, sizes.state_dim, device=device).bfloat16()
    dt, a = 0.1 * torch.rand(tokens, sizes.heads, device=device), -16 * torch.rand(sizes.heads, device=device)
    d, rows = torch.randn(sizes.heads, device=device), torch.randperm(2 * count, device=device)
    states = torch.randn(2 * count, sizes.heads, sizes.state_dim, sizes.head_dim, device=device)
    return (x, dt, a, b, c, d, states), Spans(lengths, rows[:count], rows[count:])


def launched_microseconds(call: Callable[[], object], rounds: int = 20) -> float:
    """Returns the time of one of ``rounds`` calls that the host launches one after another."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    torch.cuda.synchronize()
    start.record()
    for _ in range(rounds):
        call()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / rounds


@bench(CASES)
def ssd(case: tuple[int, ...] | int) -> list[Row]:
    """A row for each form of the op that computes such a call."""
    (x, dt, a, b, c, d, states), spans = arguments(case)
    step, written = isinstance(case, int), spans.write
    forms = {"triton" if step else "pytorch": triton.ssd}
    if not step and not fla.missing():
        forms["fla-core"] = fla.ssd
    exact = reference.ssd(x.float(), dt, a, b.float(), c.float(), d, states, spans)
    exact_states = states[written].clone()
    moved = 2 * x.nbytes + b.nbytes + c.nbytes + dt.nbytes + 2 * exact_states.nbytes
    table: list[Row] = []
    for name, form in forms.items():
        call = partial(form, x, dt, a, b, c, d, states, spans)
        states[written] = torch.nan
        for found, expected in ((call().float(), exact), (states[written], exact_states)):
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().amax()))
        time = microseconds([call] * CALLS)
        row: Row = {"spans": len(spans.read), "tokens": len(x), "step": step, "form": name}
        launched = {} if step else {"launched us": round(launched_microseconds(call), 1)}
        table.append(row | against_floor(moved, time) | launched)
    return table
