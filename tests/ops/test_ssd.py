"""What only Mamba-2's state space model has, on every backend that runs here: on a CPU, in Triton's interpreter or on a
GPU; what fla-core is asked for; long prompts. Tests that it shares with the gated delta rule are in
test_linear_attention.py."""

from __future__ import annotations

from importlib import import_module
from inspect import unwrap
from typing import Any

import pytest
import torch
from devices import DEVICE, INTERPRETED, ON_GPU
from recurrent_case import LENGTHS, NAMES, SSD, StateSpace, draw_state_space, install, plain_ssd
from torch import Tensor

from shadowkv.ops.recurrence import Spans


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> Any:
    return import_module(f"shadowkv.ops.linear_attention.{request.param}")


@pytest.mark.parametrize("a", [0.0, -40.0, -1e4])
def test_states_that_are_kept_and_states_that_are_forgotten(seed: int, backend: Any, a: float) -> None:
    case = draw_state_space(None if INTERPRETED else (70, 1), 2, 1, 16, 16, torch.float32)
    SSD.check(backend, case._replace(a=torch.full_like(case.a, a)))


def test_steps_of_no_time_change_nothing(seed: int, backend: Any) -> None:
    case = draw_state_space(None, 2, 2, 16, 16, torch.float32)
    before = case.states[case.spans.read].clone()
    out = backend.ssd(*case._replace(dt=torch.zeros_like(case.dt), d=torch.zeros_like(case.d)))
    assert torch.equal(case.states[case.spans.write], before)
    seen = (case.c.repeat_interleave(2, dim=1).unsqueeze(2) @ before).squeeze(2)
    torch.testing.assert_close(out, seen, atol=1e-5, rtol=1e-5)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("lengths", LENGTHS[1:], ids=str)
@pytest.mark.skipif(INTERPRETED or ON_GPU, reason="test_cuda_linear_attention.py has the library itself")
def test_fla_is_asked_for_the_formula(
    seed: int, lengths: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a function that does as the library's documentation says, and takes nothing else. It gets no starts of
    sequences, for which the library would make the host wait."""
    pytest.importorskip("triton")
    from shadowkv.ops.linear_attention import fla

    def chunk_simple_gla(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, scale: float, initial_state: Tensor, output_final_state: bool
    ) -> tuple[Tensor, Tensor]:
        assert output_final_state and q.shape == k.shape
        assert (q.dtype, k.dtype, v.dtype) == (dtype, dtype, dtype)
        assert g.dtype == initial_state.dtype == torch.float32
        ((one, tokens, heads),), row = {x.shape[:3] for x in (q, k, v, g)}, torch.zeros(1, dtype=torch.int64)
        assert one == 1
        # Its decay is exp(g), so dt is 1 in its products and g in its decays.
        case = StateSpace(
            *(v[0], torch.ones(tokens, heads), torch.ones(heads), k[0], scale * q[0], torch.zeros(heads)),
            *(initial_state, Spans((tokens,), row, row)),
        )
        out, after = plain_ssd(case, torch.float32, decaying=g[0])
        return out.to(v.dtype)[None], after

    install(monkeypatch, chunk_simple_gla, "fla.ops.simple_gla")
    case = draw_state_space(lengths, 2, 3, 16, 20, dtype)
    for states in (case.states.clone(), case.states.bfloat16()):
        SSD.check(fla, case._replace(states=states), dtype)


@pytest.mark.skipif(INTERPRETED, reason="PyTorch's chunks as elsewhere")
def test_long_prompts_lose_no_more_than_transformers(seed: int) -> None:
    """6,000 tokens, of a head that forgets a few of them and one that keeps thousands. Transformers' function in
    PyTorch, which may be replaced by another package's kernels."""
    modeling = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    chunk_scan = unwrap(modeling.mamba2_chunk_scan)
    case = draw_state_space((6_000,), 1, 2, 16, 16, torch.float32)
    case = case._replace(a=torch.tensor([-1.0, -1e-3], device=DEVICE))
    x, dt, b, c = (one.unsqueeze(0) for one in (case.x, case.dt, case.b, case.c))
    before, options = case.states[case.spans.read].mT, {"chunk_size": 128, "return_final_states": True}
    theirs, their_states = chunk_scan(x, dt, case.a, b, c, D=case.d, initial_states=before, **options)
    SSD.check_beside(case, theirs[0], their_states.mT)
