"""Ops of linear attention on a GPU: Triton's kernels and fla-core's against the formulas in float64, in graphs too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from precision import assert_close_like_lowp
from recurrent_case import (
    RULE,
    SSD,
    Op,
    draw_convolution,
    draw_rule,
    draw_states,
    plain_convolution,
)

from shadowkv.ops.recurrence import Spans

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from shadowkv.ops.linear_attention import fla, triton
from shadowkv.ops.linear_attention import triton as convolving

ROUNDS = 4
"""Draws of spans and numbers."""

FLA = (
    pytest.mark.skipif(bool(fla.missing()), reason="needs fla-core"),
    pytest.mark.timeout(180),  # Triton compiles and tunes its kernels for more than a minute
)
backends = pytest.mark.parametrize("name", ["triton", pytest.param("fla", marks=FLA)])
ops = pytest.mark.parametrize("op", [RULE, SSD], ids=lambda op: op.name)


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def draw_lengths() -> tuple[int, ...]:
    return tuple(torch.randint(1, 301, (int(torch.randint(1, 5, ())),)).tolist())


@backends
@ops
@pytest.mark.parametrize("shape", [(16, 1, 128, 128), (4, 3, 128, 128), (2, 2, 64, 128), (8, 8, 128, 64)], ids=str)
def test_prompts_in_bfloat16(seed: int, name: str, op: Op, shape: tuple[int, ...]) -> None:
    """Within what rounding arguments, states between chunks and what is added to them to bfloat16 may do: arguments
    that are changed by as much are what the formula is computed of for the bound. Once kernels are compiled and tuned,
    the host does not wait."""
    backend: Any = import_module(f"shadowkv.ops.linear_attention.{name}")
    for _ in range(ROUNDS):
        lengths = draw_lengths()
        op.check(backend, op.draw(lengths, *shape, torch.bfloat16), torch.bfloat16)
    case = op.draw(lengths, *shape, torch.bfloat16)
    with waiting_is_an_error():
        getattr(backend, op.name)(*case)


@backends
@ops
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(16, 1, 128, 128), (16, 3, 128, 128), (1, 2, 256, 256), (2, 1, 8, 24)], ids=str)
@pytest.mark.parametrize("batch", [1, 5, 64])
def test_steps(seed: int, name: str, op: Op, shape: tuple[int, ...], dtype: torch.dtype, batch: int) -> None:
    """Several, each of the states that the one before wrote."""
    backend: Any = import_module(f"shadowkv.ops.linear_attention.{name}")
    rows = torch.randperm(2 * batch + 3).cuda()
    spans = Spans(None, rows[:batch], rows[batch : 2 * batch])
    groups, heads, state_rows, columns = shape
    states = draw_states(spans, len(rows), groups * heads, state_rows, columns)
    for step in range(ROUNDS):
        op.check(backend, op.draw((1,) * batch, *shape, dtype)._replace(states=states, spans=spans))
        spans = Spans(None, spans.write, spans.write if step == 1 else spans.read)


def test_states_behind_two_to_the_31_numbers(seed: int) -> None:
    rows = 2**31 // (128 * 128 * 16) + 3
    states = torch.zeros(rows, 16, 128, 128, device="cuda")
    small = draw_rule(None, 16, 1, 128, 128, torch.bfloat16)
    large = small._replace(
        states=states, spans=Spans(None, small.spans.read + rows - 15, small.spans.write + rows - 15)
    )
    states[rows - 15 :] = small.states
    assert torch.equal(triton.gated_delta_rule(*small), triton.gated_delta_rule(*large))
    torch.testing.assert_close(states[rows - 15 :], small.states, atol=0, rtol=0, equal_nan=True)
    assert not states[: rows - 15].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("channels", "width"), [(6144, 4), (10240, 4), (37, 2)])
def test_convolutions(seed: int, channels: int, width: int, dtype: torch.dtype) -> None:
    for lengths in (None, *(draw_lengths() for _ in range(ROUNDS)), (1, 2, 3, 4)):
        case = draw_convolution(lengths, channels, width, dtype)
        exact, low = plain_convolution(case, torch.float64), plain_convolution(case, dtype)
        assert_close_like_lowp(convolving.causal_convolution(*case), exact[0], low[0])
        torch.testing.assert_close(case.states.double(), exact[1], atol=0, rtol=0, equal_nan=True)
    case = draw_convolution(lengths, channels, width, dtype)
    with waiting_is_an_error():
        convolving.causal_convolution(*case)


def test_steps_in_a_graph(seed: int) -> None:
    """The graph reads the rows that are there when it is replayed."""
    case = draw_rule(None, 16, 2, 128, 128, torch.bfloat16)
    mixed = draw_convolution(None, 6144, 4, torch.bfloat16)
    case.states.nan_to_num_()
    mixed.states.nan_to_num_()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        return triton.gated_delta_rule(*case), convolving.causal_convolution(*mixed)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        for spans in (case.spans, mixed.spans):
            rows = torch.randperm(15, device="cuda")
            spans.read.copy_(rows[:5])
            spans.write.copy_(rows[5:10])
        before = [x.clone() for x in (case.states, mixed.states)]
        graph.replay()
        torch.cuda.synchronize()
        after = [x.clone() for x in (case.states, mixed.states)]
        case.states.copy_(before[0])
        mixed.states.copy_(before[1])
        assert all(torch.equal(*pair) for pair in zip(captured, step()))
        assert all(torch.equal(*pair) for pair in zip(after, (case.states, mixed.states)))
