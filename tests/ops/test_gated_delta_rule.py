"""The gated delta rule against its formula in float64, on every backend that runs here: on a CPU, in Triton's
interpreter or on a GPU; what fla-core is asked for; long prompts."""

from __future__ import annotations

import sys
from importlib import import_module
from inspect import unwrap
from types import ModuleType
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
    ON_GPU,
    Rule,
    draw_rule,
    draw_spans,
    draws_of_rule,
    one_by_one,
    plain_rule,
    poison_outputs,
)
from torch import Tensor

from shadowkv.ops.recurrence import Spans

SHAPES = [(2, 1, 16, 16), (1, 3, 20, 37), (2, 2, 128, 64)]
"""Heads of keys, heads of values for each of them, dims of keys and of values."""

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> Any:
    return import_module(f"shadowkv.ops.linear_attention.{request.param}")


def check(backend: Any, case: Rule) -> None:
    """Results and states lose at most twice what the formula loses in the same precision; other rows are as before.
    States in bfloat16 are rounded once, after a span."""
    exact, draws, written = plain_rule(case, torch.float64), draws_of_rule(case), case.spans.write
    before = case.states.clone()
    out = backend.gated_delta_rule(*case)
    assert (out.dtype, out.shape) == (case.v.dtype, case.v.shape)
    assert_close_like_lowp(out, exact[0], *(low.to(out.dtype) for low, _ in draws))
    lows = (low[written].to(before.dtype) for _, low in draws)
    assert_close_like_lowp(case.states[written], exact[1][written], *lows)
    before[written] = case.states[written]
    torch.testing.assert_close(case.states, before, atol=0, rtol=0, equal_nan=True)


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS[:1] if INTERPRETED else LENGTHS, ids=str)
def test_the_formula(
    seed: int, backend: Any, lengths: tuple[int, ...] | None, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    check(backend, draw_rule(lengths, *shape, dtype))


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS[:1] if INTERPRETED else LENGTHS, ids=str)
def test_states_in_bfloat16(
    seed: int, backend: Any, lengths: tuple[int, ...] | None, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    case = draw_rule(lengths, *shape, dtype)
    check(backend, case._replace(states=case.states.bfloat16()))


def test_steps_with_states_in_bfloat16_lose_what_rounding_after_each_may_lose(seed: int, backend: Any) -> None:
    """A token's rounding moves a state by at most its norm's 256th part. What was lost before decays with the state,
    and corrections do not make it larger, as they project. Heads forget a few tokens, hundreds and thousands."""
    steps, heads = (30 if INTERPRETED else 600), 3
    rates = torch.tensor([1.0, 1e-2, 1e-3], device=DEVICE)
    states = torch.zeros(2, 1, heads, 16, 16, device=DEVICE)
    rounded, lost, row = states[1].bfloat16(), torch.zeros(heads, device=DEVICE), torch.zeros(1, dtype=torch.int64)
    spans = Spans(None, row.to(DEVICE), row.to(DEVICE))
    for _ in range(steps):
        q, k, v = torch.randn(3, 1, heads, 16, device=DEVICE)
        log_decay, beta = -rates * torch.rand(1, heads, device=DEVICE), torch.rand(1, heads, device=DEVICE)
        for one in (states[0], rounded):
            backend.gated_delta_rule(q, k, v, log_decay, beta, one, spans)
        lost = log_decay[0].exp() * lost + rounded[0].float().flatten(1).norm(dim=1) / 256
        found = (states[0, 0] - rounded[0].float()).flatten(1).norm(dim=1)
        assert (found <= lost).all(), f"{found.tolist()} of at most {lost.tolist()}"
    assert (found > 0).all()


@pytest.mark.parametrize("log_decay", [0.0, -40.0, -1e4])
def test_states_that_are_kept_and_states_that_are_forgotten(seed: int, backend: Any, log_decay: float) -> None:
    case = draw_rule((70, 1), 2, 1, 16, 16, torch.float32)
    check(backend, case._replace(log_decay=torch.full_like(case.log_decay, log_decay)))


def test_queries_and_keys_of_zero(seed: int, backend: Any) -> None:
    case = draw_rule(None, 2, 1, 16, 16, torch.float32)
    case.q[1], case.k[2] = 0, 0
    check(backend, case)


def test_padding_rows_may_share_a_state(seed: int, backend: Any) -> None:
    """What becomes of it does not matter; rows beside them are right."""
    case = draw_rule(None, 2, 1, 128, 64, torch.float32)
    own = case.spans.read[:2]
    shared = case.spans.read[2:3].expand(3)
    rows = torch.cat((own, shared))
    case = case._replace(spans=Spans(None, rows, rows))
    exact, draws = plain_rule(case, torch.float64), draws_of_rule(case)
    out = backend.gated_delta_rule(*case)
    assert_close_like_lowp(out[:2], exact[0][:2], *(low[:2] for low, _ in draws))
    assert_close_like_lowp(case.states[own], exact[1][own], *(low[own] for _, low in draws))
    assert out.isfinite().all()


@DTYPES
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16], ids=["states fp32", "states bf16"])
@pytest.mark.parametrize("chains", CHAINS, ids=str)
def test_chains_are_steps_one_after_another(
    seed: int, backend: Any, chains: tuple[int, ...], states: torch.dtype, dtype: torch.dtype
) -> None:
    """Bit by bit, with the state after each token."""
    case = draw_rule(None, 2, 2, 20, 37, dtype, chains)
    case = case._replace(states=case.states.to(states))
    other = case._replace(states=case.states.clone())
    out, wanted = backend.gated_delta_rule(*case), one_by_one(backend.gated_delta_rule, other)
    real, rows = slice(sum(chains)), case.spans.write[: sum(chains)]
    assert torch.equal(out[real], wanted[real]) and out.isfinite().all()
    assert torch.equal(case.states[rows], other.states[rows]) and case.states[rows].isfinite().all()
    before = case.spans.read[:1]
    assert torch.equal(case.states[before], other.states[before]), "the state before the chain stays"


def test_outputs_are_written_whole(seed: int, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw_rule(None, 1, 3, 20, 37, torch.float32)
    poison_outputs(monkeypatch)
    assert backend.gated_delta_rule(*case).isfinite().all()


@pytest.mark.skipif("cpu" not in NAMES, reason="the C++ extension is not built, or not what runs here")
@pytest.mark.parametrize("lengths", [None, (70, 3, 200)], ids=str)
def test_the_number_of_threads_changes_no_bit(seed: int, lengths: tuple[int, ...] | None) -> None:
    from shadowkv.ops.linear_attention import cpu

    case, before, results = draw_rule(lengths, 2, 2, 64, 48, torch.float32), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            states = case.states.clone()
            results.append((cpu.gated_delta_rule(*case._replace(states=states)), states))
    finally:
        torch.set_num_threads(before)
    for out, states in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(states.nan_to_num(), results[0][1].nan_to_num())


@pytest.mark.skipif("cpu" not in NAMES, reason="the C++ extension is not built, or not what runs here")
@pytest.mark.parametrize(
    ("error", "match", "changes"),
    [
        (RuntimeError, "q is Half, not Float or BFloat16", {"q": torch.zeros(5, 2, 16).half()}),
        (RuntimeError, "v is BFloat16, not Float", {"v": torch.zeros(5, 2, 16).bfloat16()}),
        (RuntimeError, r"q has shape \[5, 2, 16\], k has shape \[5, 2, 8\]", {"k": torch.zeros(5, 2, 8)}),
        (RuntimeError, "2 value heads are no multiple of 3 key heads", dict.fromkeys("qk", torch.zeros(5, 3, 16))),
        (RuntimeError, "log_decay and beta have shapes", {"beta": torch.zeros(5, 3)}),
        (RuntimeError, r"states has shape \[15, 2, 8, 16\], rows need", {"states": torch.zeros(15, 2, 8, 16)}),
        (RuntimeError, "its rows must be contiguous", {"states": torch.zeros(15, 2, 16, 16).mT}),
        (RuntimeError, "states is Double, not Float or BFloat16", {"states": torch.zeros(15, 2, 16, 16).double()}),
        (RuntimeError, "2 spans have 5 rows to read", {"lengths": (4, 1)}),
        (RuntimeError, "spans have 6 tokens, not 5", {"lengths": (1, 1, 1, 1, 2)}),
        (RuntimeError, "a span has 0 tokens, not at least one", {"lengths": (1, 1, 1, 2, 0)}),
        (IndexError, r"row 15 is not in \[0, 15\)", {"read": torch.full((5,), 15)}),
        (IndexError, r"row -1 is not in \[0, 15\)", {"write": torch.full((5,), -1)}),
    ],
    ids=lambda value: None if isinstance(value, str) else "",
)
def test_the_binding_refuses_what_does_not_fit(error: type[Exception], match: str, changes: dict[str, Any]) -> None:
    case = draw_rule(None, 2, 1, 16, 16, torch.float32)
    args = case._asdict() | {"lengths": None, "read": case.spans.read, "write": case.spans.write, "eps": 1e-6}
    del args["spans"]
    with pytest.raises(error, match=match):
        torch.ops.shadowkv.gated_delta_rule(*(args | changes).values())


@pytest.mark.skipif("cpu" not in NAMES, reason="the C++ extension is not built, or not what runs here")
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_fake_has_the_shape_of_the_op(seed: int, states: torch.dtype) -> None:
    case = draw_rule((3, 4), 2, 3, 16, 20, torch.bfloat16)
    case = case._replace(states=case.states.nan_to_num().to(states))
    args = (*case[:-1], list(case.spans.lengths or ()), case.spans.read, case.spans.write, 1e-6)
    op = torch.ops.shadowkv.gated_delta_rule
    torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("lengths", LENGTHS[1:], ids=str)
@pytest.mark.skipif(INTERPRETED or ON_GPU, reason="test_cuda_gated_delta_rule.py has the library itself")
def test_fla_is_asked_for_the_formula(
    seed: int, lengths: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a function that does as the library's documentation says, and takes nothing else."""
    pytest.importorskip("triton")
    from shadowkv.ops.linear_attention import fla

    def chunk_gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, initial_state: Tensor, output_final_state: bool,
        use_qk_l2norm_in_kernel: bool, cu_seqlens: Tensor, chunk_indices: Tensor, chunk_size: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert output_final_state and use_qk_l2norm_in_kernel
        assert cu_seqlens.dtype == torch.int64
        lengths = tuple(cu_seqlens.diff().tolist())
        chunks = [[n, i] for n, length in enumerate(lengths) for i in range(-(-length // chunk_size))]
        assert chunk_indices.tolist() == chunks
        assert initial_state.dtype == torch.float32
        rows, (tokens,) = torch.arange(len(lengths)), {x.shape[:2] for x in (q, k, v, g, beta)}
        assert tokens == (1, cu_seqlens[-1])
        out, after = plain_rule(
            Rule(q[0], k[0], v[0], g[0], beta[0], initial_state, Spans(lengths, rows, rows)), torch.float32
        )
        return out.to(v.dtype)[None], after

    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    stub = ModuleType("fla.ops.gated_delta_rule")
    stub.chunk_gated_delta_rule = chunk_gated_delta_rule  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    case = draw_rule(lengths, 2, 3, 16, 20, dtype)
    check(fla, case._replace(states=case.states.clone()))
    check(fla, case._replace(states=case.states.bfloat16()))


def test_chunks_of_spans(seed: int) -> None:
    spans, _, _ = draw_spans((1, 64, 65, 130))
    assert spans.chunks.tolist() == [[0, 0], [1, 0], [2, 0], [2, 1], [3, 0], [3, 1], [3, 2]]
    assert spans.starts.tolist() == [0, 1, 65, 130, 260]
    assert {x.device.type for x in (spans.chunks, spans.starts)} == {DEVICE}


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="as long as it is, and PyTorch's chunks as elsewhere")
def test_long_prompts_lose_no_more_than_transformers(seed: int) -> None:
    """60,000 tokens, of a head that forgets a few of them and one that keeps thousands. Transformers' function in
    PyTorch: where fla-core is installed, the one of that name calls its kernels, which multiply float32 in TF32."""
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    torch_chunk_gated_delta_rule = unwrap(modeling.torch_chunk_gated_delta_rule)
    case = draw_rule((60_000,), 2, 1, 16, 16, torch.float32)
    case = case._replace(log_decay=-torch.rand(60_000, 2, device=DEVICE) * torch.tensor([1.0, 1e-3], device=DEVICE))
    written, draws = case.spans.write, draws_of_rule(case)
    exact, exact_states = plain_rule(case, torch.float64)
    theirs, their_states = torch_chunk_gated_delta_rule(
        *(x.unsqueeze(0) for x in case[:5]),
        initial_state=case.states[case.spans.read],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    for name in NAMES:
        states = case.states.clone()
        module = import_module(f"shadowkv.ops.linear_attention.{name}")
        found = (module.gated_delta_rule(*case._replace(states=states)), theirs[0], exact, *(low for low, _ in draws))
        after = (states[written], their_states, exact_states[written], *(low[written] for _, low in draws))
        for mine, other, oracle, *low in (found, after):
            assert_close_like_lowp(mine, oracle, *low)
            assert_close_like_lowp(other, oracle, *low)
            mine_lost, other_lost = ((x.double() - oracle).abs().max() for x in (mine, other))
            assert mine_lost <= 2 * other_lost, f"off by {mine_lost:.3g}, transformers by {other_lost:.3g}"
