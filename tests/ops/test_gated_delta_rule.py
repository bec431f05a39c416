"""What only the gated delta rule has, on every backend that runs here: on a CPU, in Triton's interpreter or on a GPU;
what fla-core is asked for; long prompts. Tests that it shares with Mamba-2's op are in test_linear_attention.py."""

from __future__ import annotations

from importlib import import_module
from inspect import unwrap
from typing import Any

import pytest
import torch
from devices import DEVICE, INTERPRETED, ON_GPU
from recurrent_case import LENGTHS, NAMES, RULE, Rule, draw_rule, install, plain_rule
from torch import Tensor

from shadowkv.ops.recurrence import Spans


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> Any:
    return import_module(f"shadowkv.ops.linear_attention.{request.param}")


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
    RULE.check(backend, case._replace(log_decay=torch.full_like(case.log_decay, log_decay)))


def test_queries_and_keys_of_zero(seed: int, backend: Any) -> None:
    case = draw_rule(None, 2, 1, 16, 16, torch.float32)
    case.q[1], case.k[2] = 0, 0
    RULE.check(backend, case)


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
@pytest.mark.skipif(INTERPRETED or ON_GPU, reason="test_cuda_linear_attention.py has the library itself")
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

    install(monkeypatch, chunk_gated_delta_rule, "fla.ops.gated_delta_rule")
    case = draw_rule(lengths, 2, 3, 16, 20, dtype)
    RULE.check(fla, case._replace(states=case.states.clone()))
    RULE.check(fla, case._replace(states=case.states.bfloat16()))


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="as long as it is, and PyTorch's chunks as elsewhere")
def test_long_prompts_lose_no_more_than_transformers(seed: int) -> None:
    """60,000 tokens, of a head that forgets a few of them and one that keeps thousands. Transformers' function in
    PyTorch: where fla-core is installed, the one of that name calls its kernels, which multiply float32 in TF32."""
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    torch_chunk_gated_delta_rule = unwrap(modeling.torch_chunk_gated_delta_rule)
    case = draw_rule((60_000,), 2, 1, 16, 16, torch.float32)
    case = case._replace(log_decay=-torch.rand(60_000, 2, device=DEVICE) * torch.tensor([1.0, 1e-3], device=DEVICE))
    theirs, their_states = torch_chunk_gated_delta_rule(
        *(x.unsqueeze(0) for x in case[:5]),
        initial_state=case.states[case.spans.read],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    RULE.check_beside(case, theirs[0], their_states)
