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


@pytest.fixture(params=[name for name in NAMES if name != "cpu"])
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
    module = import_module(f"shadowkv.ops.linear_attention.{'triton' if DEVICE == 'cuda' else 'reference'}")
    found = (module.ssd(*case), theirs[0], exact, *(low for low, _ in draws))
    after = (case.states[written], their_states.mT, exact_states[written], *(low[written] for _, low in draws))
    for mine, other, oracle, *low in (found, after):
        assert_close_like_lowp(mine, oracle, *low)
        mine_lost, other_lost = ((one.double() - oracle).abs().max() for one in (mine, other))
        assert mine_lost <= 2 * other_lost, f"off by {mine_lost:.3g}, transformers by {other_lost:.3g}"
