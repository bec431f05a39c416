"""The causal convolution against its formula in float64, on every backend that runs here: on a CPU, in Triton's
interpreter or on a GPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from precision import assert_close_like_lowp
from recurrent_case import (
    CHAINS,
    LENGTHS,
    NAMES,
    Convolution,
    draw_convolution,
    one_by_one,
    plain_convolution,
    poison_outputs,
)

from shadowkv.ops.recurrence import Spans

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> Any:
    return import_module(f"shadowkv.ops.linear_attention.{request.param}")


def check(backend: Any, case: Convolution) -> None:
    """Results lose at most twice what the formula loses in the same precision. States lose nothing, and rows that are
    not written are as before."""
    exact, low = plain_convolution(case, torch.float64), plain_convolution(case, case.x.dtype)
    out = backend.causal_convolution(*case)
    assert (out.dtype, out.shape) == (case.x.dtype, case.x.shape)
    assert_close_like_lowp(out, exact[0], low[0])
    torch.testing.assert_close(case.states.double(), exact[1], atol=0, rtol=0, equal_nan=True)


@DTYPES
@pytest.mark.parametrize(
    ("channels", "width", "bias"), [(64, 4, True), (37, 4, False), (300, 2, False), (513, 3, True), (20, 6, False)]
)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_formula(
    seed: int, backend: Any, lengths: tuple[int, ...] | None, channels: int, width: int, bias: bool, dtype: torch.dtype
) -> None:
    check(backend, draw_convolution(lengths, channels, width, dtype, bias=bias))


def test_spans_of_several_chunks_that_write_what_they_read(seed: int, backend: Any) -> None:
    case = draw_convolution((200, 66), 70, 4, torch.float32)
    rows = case.spans.read
    check(backend, case._replace(spans=Spans((200, 66), rows, rows)))


def test_large_inputs_do_not_overflow(seed: int, backend: Any) -> None:
    case = draw_convolution((70,), 37, 4, torch.float32)
    check(backend, case._replace(x=1e4 * case.x))


def test_padding_rows_may_share_a_state(seed: int, backend: Any) -> None:
    """What becomes of it does not matter; rows beside them are right."""
    case = draw_convolution(None, 300, 4, torch.float32)
    rows = torch.cat((case.spans.read[:2], case.spans.read[2:3].expand(3)))
    case = case._replace(spans=Spans(None, rows, rows))
    exact, low = plain_convolution(case, torch.float64), plain_convolution(case, torch.float32)
    out = backend.causal_convolution(*case)
    assert_close_like_lowp(out[:2], exact[0][:2], low[0][:2])
    assert torch.equal(case.states[rows[:2]].double(), exact[1][rows[:2]])
    assert out.isfinite().all()


@DTYPES
@pytest.mark.parametrize(("channels", "width", "bias"), [(37, 4, True), (300, 2, False)])
@pytest.mark.parametrize("chains", CHAINS, ids=str)
def test_chains_are_steps_one_after_another(
    seed: int, backend: Any, chains: tuple[int, ...], channels: int, width: int, bias: bool, dtype: torch.dtype
) -> None:
    """Bit by bit, with the state after each token."""
    case = draw_convolution(None, channels, width, dtype, chains, bias)
    other = case._replace(states=case.states.clone())
    out, wanted = backend.causal_convolution(*case), one_by_one(backend.causal_convolution, other)
    real, rows = slice(sum(chains)), case.spans.write[: sum(chains)]
    assert torch.equal(out[real], wanted[real]) and out.isfinite().all()
    assert torch.equal(case.states[rows], other.states[rows]) and case.states[rows].isfinite().all()


def test_outputs_are_written_whole(seed: int, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw_convolution((70, 1), 37, 4, torch.float32)
    poison_outputs(monkeypatch)
    assert backend.causal_convolution(*case).isfinite().all()


@pytest.mark.skipif("cpu" not in NAMES, reason="the C++ extension is not built, or not what runs here")
@pytest.mark.parametrize(
    ("error", "match", "changes"),
    [
        (RuntimeError, "x is Half, not Float or BFloat16", {"x": torch.zeros(5, 37).half()}),
        (RuntimeError, "weight is BFloat16, not Float", {"weight": torch.zeros(37, 4).bfloat16()}),
        (RuntimeError, r"weight has shape \[36, 4\], x has shape \[5, 37\]", {"weight": torch.zeros(36, 4)}),
        (RuntimeError, r"x has strides \[1, 5\]; the last must be 1", {"x": torch.zeros(37, 5).T}),
        (RuntimeError, r"states has shape \[15, 37, 4\], rows need \[37, 3\]", {"states": torch.zeros(15, 37, 4)}),
        (RuntimeError, "its rows must be contiguous", {"states": torch.zeros(15, 3, 37).mT}),
        (RuntimeError, r"bias has shape \[36\] and strides \[1\], x has shape", {"bias": torch.zeros(36)}),
        (RuntimeError, "2 spans have 5 rows to read", {"lengths": (4, 1)}),
        (IndexError, r"row 15 is not in \[0, 15\)", {"read": torch.full((5,), 15)}),
    ],
    ids=lambda value: None if isinstance(value, str) else "",
)
def test_the_binding_refuses_what_does_not_fit(error: type[Exception], match: str, changes: dict[str, Any]) -> None:
    case = draw_convolution(None, 37, 4, torch.float32)
    args = case._asdict() | {"lengths": None, "read": case.spans.read, "write": case.spans.write}
    del args["spans"], args["bias"]  # it is the op's last argument
    with pytest.raises(error, match=match):
        torch.ops.shadowkv.causal_convolution(*(args | changes).values())


@pytest.mark.skipif("cpu" not in NAMES, reason="the C++ extension is not built, or not what runs here")
def test_the_fake_has_the_shape_of_the_op(seed: int) -> None:
    case = draw_convolution((3, 4), 37, 4, torch.bfloat16, bias=True)
    case.states.nan_to_num_()
    args = (*case[:3], list(case.spans.lengths or ()), case.spans.read, case.spans.write, case.bias)
    op = torch.ops.shadowkv.causal_convolution
    torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))
