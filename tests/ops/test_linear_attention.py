"""Gated DeltaNet's and Mamba-2's op against their formulas in float64, on every backend that runs here: on a CPU, in
Triton's interpreter or on a GPU. What only one of them has is in test_gated_delta_rule.py and test_ssd.py."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from devices import DEVICE, INTERPRETED, by_threads
from precision import assert_close_like_lowp
from recurrent_case import CHAINS, LENGTHS, NAMES, RULE, SSD, Op, draw_spans, one_by_one, poison_outputs

from shadowkv.ops.recurrence import Spans

SHAPES = [(2, 1, 16, 16), (1, 3, 20, 37), (2, 4, 128, 64)]
"""Groups of heads, heads of each, rows and columns of their states."""

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
STATES = pytest.mark.parametrize("states", [torch.float32, torch.bfloat16], ids=["states fp32", "states bf16"])


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> Any:
    return import_module(f"shadowkv.ops.linear_attention.{request.param}")


@pytest.fixture(params=[RULE, SSD], ids=lambda op: op.name)
def op(request: pytest.FixtureRequest) -> Op:
    return request.param


@DTYPES
@STATES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS[:1] if INTERPRETED else LENGTHS, ids=str)
def test_the_formula(
    seed: int,
    backend: Any,
    op: Op,
    lengths: tuple[int, ...] | None,
    shape: tuple[int, ...],
    states: torch.dtype,
    dtype: torch.dtype,
) -> None:
    case = op.draw(lengths, *shape, dtype)
    op.check(backend, case._replace(states=case.states.to(states)))


def test_padding_rows_may_share_a_state(seed: int, backend: Any, op: Op) -> None:
    """What becomes of it does not matter; rows beside them are right."""
    case = op.draw(None, 2, 1, 128, 64, torch.float32)
    own = case.spans.read[:2]
    rows = torch.cat((own, case.spans.read[2:3].expand(3)))
    case = case._replace(spans=Spans(None, rows, rows))
    exact, draws = op.plain(case, torch.float64), op.draws(case)
    out = getattr(backend, op.name)(*case)
    assert_close_like_lowp(out[:2], exact[0][:2], *(low[:2] for low, _ in draws))
    assert_close_like_lowp(case.states[own], exact[1][own], *(low[own] for _, low in draws))
    assert out.isfinite().all()


@DTYPES
@STATES
@pytest.mark.parametrize("chains", CHAINS, ids=str)
def test_chains_are_steps_one_after_another(
    seed: int, backend: Any, op: Op, chains: tuple[int, ...], states: torch.dtype, dtype: torch.dtype
) -> None:
    """Bit by bit, with the state after each token."""
    compute = getattr(backend, op.name)
    case = op.draw(None, 2, 2, 20, 37, dtype, chains)
    case = case._replace(states=case.states.to(states))
    other = case._replace(states=case.states.clone())
    out, wanted = compute(*case), one_by_one(compute, other)
    real, rows = slice(sum(chains)), case.spans.write[: sum(chains)]
    assert torch.equal(out[real], wanted[real]) and out.isfinite().all()
    assert torch.equal(case.states[rows], other.states[rows]) and case.states[rows].isfinite().all()
    before = case.spans.read[:1]
    assert torch.equal(case.states[before], other.states[before]), "the state before the chain stays"


def test_outputs_are_written_whole(seed: int, backend: Any, op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    case = op.draw(None, 1, 3, 20, 37, torch.float32)
    poison_outputs(monkeypatch)
    assert getattr(backend, op.name)(*case).isfinite().all()


@pytest.mark.skipif("cpu" not in NAMES, reason="the C++ extension is not built, or not what runs here")
@pytest.mark.parametrize(("op", "lengths"), [(RULE, None), (RULE, (70, 3, 200)), (SSD, None)])
def test_the_number_of_threads_changes_no_bit(seed: int, op: Op, lengths: tuple[int, ...] | None) -> None:
    from shadowkv.ops.linear_attention import cpu

    case = op.draw(lengths, 2, 2, 64, 48, torch.float32)

    def compute() -> tuple[torch.Tensor, torch.Tensor]:
        states = case.states.clone()
        return getattr(cpu, op.name)(*case._replace(states=states)), states.nan_to_num()

    first, *others = by_threads(compute)
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other))


def test_chunks_of_spans(seed: int) -> None:
    spans, _, _ = draw_spans((1, 64, 65, 130))
    assert spans.chunks.tolist() == [[0, 0], [1, 0], [2, 0], [2, 1], [3, 0], [3, 1], [3, 2]]
    assert spans.starts.tolist() == [0, 1, 65, 130, 260]
    assert {x.device.type for x in (spans.chunks, spans.starts)} == {DEVICE}
