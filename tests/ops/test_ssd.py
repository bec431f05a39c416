"""Mamba-2's state space model against its formula in float64, on every backend that runs here: on a CPU, in Triton's
interpreter or on a GPU; long prompts."""

from __future__ import annotations

from importlib import import_module
from inspect import unwrap
from typing import Any

import pytest
import torch
from precision import assert_close_like_lowp
from recurrent_case import (
    CHAINS,
    DEVICE,
    INTERPRETED,
    LENGTHS,
    NAMES,
    StateSpace,
    draw_state_space,
    draws_of_state_space,
    one_by_one,
    plain_ssd,
    poison_outputs,
)

from shadowkv.ops.recurrence import Spans

SHAPES = [(2, 1, 16, 16), (1, 3, 20, 37), (2, 4, 128, 64)]
"""Groups, heads of each, dims of states and of heads."""

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
STATES = pytest.mark.parametrize("states", [torch.float32, torch.bfloat16], ids=["states fp32", "states bf16"])


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> Any:
    return import_module(f"shadowkv.ops.linear_attention.{request.param}")


def check(backend: Any, case: StateSpace) -> None:
    """Results and states lose at most twice what the formula loses in the same precision; other rows are as before.
    States in bfloat16 are rounded once, after a span."""
    exact, draws, written = plain_ssd(case, torch.float64), draws_of_state_space(case), case.spans.write
    before = case.states.clone()
    out = backend.ssd(*case)
    assert (out.dtype, out.shape) == (case.x.dtype, case.x.shape)
    assert_close_like_lowp(out, exact[0], *(low.to(out.dtype) for low, _ in draws))
    lows = (low[written].to(before.dtype) for _, low in draws)
    assert_close_like_lowp(case.states[written], exact[1][written], *lows)
    before[written] = case.states[written]
    torch.testing.assert_close(case.states, before, atol=0, rtol=0, equal_nan=True)


@DTYPES
@STATES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS[:1] if INTERPRETED else LENGTHS, ids=str)
def test_the_formula(
    seed: int,
    backend: Any,
    lengths: tuple[int, ...] | None,
    shape: tuple[int, ...],
    states: torch.dtype,
    dtype: torch.dtype,
) -> None:
    case = draw_state_space(lengths, *shape, dtype)
    check(backend, case._replace(states=case.states.to(states)))


@pytest.mark.parametrize("a", [0.0, -40.0, -1e4])
def test_states_that_are_kept_and_states_that_are_forgotten(seed: int, backend: Any, a: float) -> None:
    case = draw_state_space(None if INTERPRETED else (70, 1), 2, 1, 16, 16, torch.float32)
    check(backend, case._replace(a=torch.full_like(case.a, a)))


def test_steps_of_no_time_change_nothing(seed: int, backend: Any) -> None:
    case = draw_state_space(None, 2, 2, 16, 16, torch.float32)
    before = case.states[case.spans.read].clone()
    out = backend.ssd(*case._replace(dt=torch.zeros_like(case.dt), d=torch.zeros_like(case.d)))
    assert torch.equal(case.states[case.spans.write], before)
    seen = (case.c.repeat_interleave(2, dim=1).unsqueeze(2) @ before).squeeze(2)
    torch.testing.assert_close(out, seen, atol=1e-5, rtol=1e-5)


def test_padding_rows_may_share_a_state(seed: int, backend: Any) -> None:
    """What becomes of it does not matter; rows beside them are right."""
    case = draw_state_space(None, 2, 1, 128, 64, torch.float32)
    own = case.spans.read[:2]
    rows = torch.cat((own, case.spans.read[2:3].expand(3)))
    case = case._replace(spans=Spans(None, rows, rows))
    exact, draws = plain_ssd(case, torch.float64), draws_of_state_space(case)
    out = backend.ssd(*case)
    assert_close_like_lowp(out[:2], exact[0][:2], *(low[:2] for low, _ in draws))
    assert_close_like_lowp(case.states[own], exact[1][own], *(low[own] for _, low in draws))
    assert out.isfinite().all()


@DTYPES
@STATES
@pytest.mark.parametrize("chains", CHAINS, ids=str)
def test_chains_are_steps_one_after_another(
    seed: int, backend: Any, chains: tuple[int, ...], states: torch.dtype, dtype: torch.dtype
) -> None:
    """Bit by bit, with the state after each token."""
    case = draw_state_space(None, 2, 2, 20, 37, dtype, chains)
    case = case._replace(states=case.states.to(states))
    other = case._replace(states=case.states.clone())
    out, wanted = backend.ssd(*case), one_by_one(backend.ssd, other)
    real, rows = slice(sum(chains)), case.spans.write[: sum(chains)]
    assert torch.equal(out[real], wanted[real]) and out.isfinite().all()
    assert torch.equal(case.states[rows], other.states[rows]) and case.states[rows].isfinite().all()
    before = case.spans.read[:1]
    assert torch.equal(case.states[before], other.states[before]), "the state before the chain stays"


def test_outputs_are_written_whole(seed: int, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw_state_space(None, 1, 3, 20, 37, torch.float32)
    poison_outputs(monkeypatch)
    assert backend.ssd(*case).isfinite().all()


@pytest.mark.skipif("cpu" not in NAMES, reason="the C++ extension is not built, or not what runs here")
def test_the_number_of_threads_changes_no_bit(seed: int) -> None:
    from shadowkv.ops.linear_attention import cpu

    case, before, results = draw_state_space(None, 2, 2, 64, 48, torch.float32), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            states = case.states.clone()
            results.append((cpu.ssd(*case._replace(states=states)), states))
    finally:
        torch.set_num_threads(before)
    for out, states in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(states.nan_to_num(), results[0][1].nan_to_num())


@pytest.mark.skipif("cpu" not in NAMES, reason="the C++ extension is not built, or not what runs here")
@pytest.mark.parametrize(
    ("error", "match", "changes"),
    [
        (RuntimeError, "c is Half, not Float or BFloat16", {"c": torch.zeros(5, 2, 16).half()}),
        (RuntimeError, "x is BFloat16, not Float", {"x": torch.zeros(5, 4, 16).bfloat16()}),
        (RuntimeError, r"c has shape \[5, 2, 16\], b has shape \[5, 2, 8\]", {"b": torch.zeros(5, 2, 8)}),
        (RuntimeError, "4 heads are no multiple of 3 groups", dict.fromkeys("bc", torch.zeros(5, 3, 16))),
        (RuntimeError, "log_decay and dt have shapes", {"dt": torch.zeros(5, 3)}),
        (RuntimeError, r"d has shape \[3\], x has shape \[5, 4, 16\]", {"d": torch.zeros(3)}),
        (RuntimeError, r"states has shape \[15, 4, 8, 16\], rows need", {"states": torch.zeros(15, 4, 8, 16)}),
        (RuntimeError, "5 spans have 4 rows to read", {"read": torch.zeros(4, dtype=torch.int64)}),
        (IndexError, r"row 15 is not in \[0, 15\)", {"read": torch.full((5,), 15)}),
    ],
    ids=lambda value: None if isinstance(value, str) else "",
)
def test_the_binding_refuses_what_does_not_fit(error: type[Exception], match: str, changes: dict[str, Any]) -> None:
    case = draw_state_space(None, 2, 2, 16, 16, torch.float32)
    args: dict[str, Any] = {"x": case.x, "dt": case.dt, "log_decay": case.dt * case.a, "b": case.b, "c": case.c}
    args |= {"d": case.d, "states": case.states, "read": case.spans.read, "write": case.spans.write}
    with pytest.raises(error, match=match):
        torch.ops.shadowkv.ssd(*(args | changes).values())


@pytest.mark.skipif("cpu" not in NAMES, reason="the C++ extension is not built, or not what runs here")
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_fake_has_the_shape_of_the_op(seed: int, states: torch.dtype) -> None:
    case = draw_state_space(None, 2, 3, 16, 20, torch.bfloat16)
    kept, spans = case.states.nan_to_num().to(states), case.spans
    args = (case.x, case.dt, case.dt * case.a, case.b, case.c, case.d, kept, spans.read, spans.write)
    torch.library.opcheck(torch.ops.shadowkv.ssd.default, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.skipif(INTERPRETED, reason="PyTorch's chunks as elsewhere")
def test_long_prompts_lose_no_more_than_transformers(seed: int) -> None:
    """6,000 tokens, of a head that forgets a few of them and one that keeps thousands. Transformers' function in
    PyTorch, which may be replaced by another package's kernels."""
    modeling = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    chunk_scan = unwrap(modeling.mamba2_chunk_scan)
    case = draw_state_space((6_000,), 1, 2, 16, 16, torch.float32)
    case = case._replace(a=torch.tensor([-1.0, -1e-3], device=DEVICE))
    written, draws = case.spans.write, draws_of_state_space(case)
    exact, exact_states = plain_ssd(case, torch.float64)
    x, dt, b, c = (one.unsqueeze(0) for one in (case.x, case.dt, case.b, case.c))
    before, options = case.states[case.spans.read].mT, {"chunk_size": 128, "return_final_states": True}
    theirs, their_states = chunk_scan(x, dt, case.a, b, c, D=case.d, initial_states=before, **options)
    for name in NAMES:
        states = case.states.clone()
        module = import_module(f"shadowkv.ops.linear_attention.{name}")
        found = (module.ssd(*case._replace(states=states)), theirs[0], exact, *(low for low, _ in draws))
        after = (states[written], their_states.mT, exact_states[written], *(low[written] for _, low in draws))
        for mine, other, oracle, *low in (found, after):
            assert_close_like_lowp(mine, oracle, *low)
            mine_lost, other_lost = ((one.double() - oracle).abs().max() for one in (mine, other))
            assert mine_lost <= 2 * other_lost, f"{name} is off by {mine_lost:.3g}, transformers by {other_lost:.3g}"
