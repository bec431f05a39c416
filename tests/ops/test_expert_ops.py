"""Routing, order of rows and sums of experts: references, and Triton kernels on a GPU or in the interpreter.
``models/test_experts.py`` compares models' routing with transformers."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICE, ON_GPU, TRITON_RUNS

from shadowkv.ops.choose_experts import reference as choosing
from shadowkv.ops.choose_experts.routing import Routing
from shadowkv.ops.expert_rows import reference as sorting
from shadowkv.ops.expert_rows import reference as summing

CASES = [(1, 8, 128), (5, 1, 4), (70, 4, 32), (300, 3, 7), (0, 2, 4)]
"""Tokens, experts per token, experts."""
CHOICES = CASES if ON_GPU else [(min(tokens, 20), k, experts) for tokens, k, experts in CASES]
"""Fewer tokens in the interpreter, which is slow: each token is a program, and does not depend on the others."""
HERE = [(0, 1.0), (0, 0.5), (2, 0.5), (3, 0.0)]
"""The first expert of this rank, and the rank's share of all experts."""


def drawn(tokens: int, k: int, experts: int) -> torch.Tensor:
    """Different experts [tokens, k], some more often than others."""
    chances = torch.linspace(0.1, 2.0, experts).expand(max(tokens, 1), -1)
    return chances.multinomial(k)[:tokens].to(DEVICE)


@pytest.mark.parametrize(("first", "share"), HERE)
@pytest.mark.parametrize(("tokens", "k", "experts"), CASES)
def test_rows_are_in_the_order_of_experts(
    seed: str, tokens: int, k: int, experts: int, first: int, share: float
) -> None:
    chosen, count = drawn(tokens, k, experts), max(1, int(share * experts))
    token, number, row, offsets = sorting.sort_by_expert(chosen, first, count)
    wanted = [int(e) - first if first <= e < first + count else count for e in chosen.flatten()]
    order = sorted(range(tokens * k), key=lambda choice: (wanted[choice], choice))
    assert number.tolist() == [wanted[choice] for choice in order]
    assert token.tolist() == [choice // k for choice in order]
    assert row.flatten()[order].tolist() == list(range(tokens * k))
    assert offsets.dtype == torch.int32
    assert offsets.tolist() == [sum(e < bound for e in wanted) for bound in range(count + 1)]


def test_sums_leave_out_rows_that_are_no_experts(seed: str) -> None:
    out, weights, row = torch.randn(6, 5), torch.rand(3, 2), torch.tensor([[4, 0], [1, 3], [5, 2]])
    wanted = torch.stack([sum(weights[t, j] * out[row[t, j]] for j in range(2)) for t in range(3)])
    torch.testing.assert_close(summing.sum_experts(out, row, weights), wanted)
    out[4:] = torch.nan
    offsets = torch.tensor([0, 1, 4], dtype=torch.int32)
    wanted = torch.stack(
        [weights[0, 1] * out[0], weights[1, 0] * out[1] + weights[1, 1] * out[3], weights[2, 1] * out[2]]
    )
    torch.testing.assert_close(summing.sum_experts(out, row, weights, offsets), wanted)


if TRITON_RUNS:
    pytest.importorskip("triton")
    from shadowkv.ops.choose_experts import triton as choosing_triton
    from shadowkv.ops.expert_rows import triton as sorting_triton
    from shadowkv.ops.expert_rows import triton as summing_triton

    @pytest.mark.parametrize(("first", "share"), HERE)
    @pytest.mark.parametrize("span", [sorting_triton.SPAN, 128])
    @pytest.mark.parametrize(("tokens", "k", "experts"), [*CASES, *([(3000, 8, 128)] if ON_GPU else [])])
    def test_the_kernel_of_the_order(
        seed: str,
        tokens: int,
        k: int,
        experts: int,
        first: int,
        share: float,
        span: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(sorting_triton, "SPAN", span)
        chosen, count = drawn(tokens, k, experts), max(1, int(share * experts))
        found = sorting_triton.sort_by_expert(chosen, first, count)
        for x, y in zip(found, sorting.sort_by_expert(chosen, first, count), strict=True):
            assert x.shape == y.shape and torch.equal(x.long(), y.long())

    def same_choice(
        logits: torch.Tensor, correction: torch.Tensor | None, scores: str, found: torch.Tensor, wanted: torch.Tensor
    ) -> None:
        """Different experts for a token, which count as much as the reference's but for rounding."""
        ranked = logits.double().sigmoid() if scores == "sigmoid" else logits.double().softmax(1)
        if correction is not None:
            ranked = ranked + correction
        torch.testing.assert_close(ranked.gather(1, found), ranked.gather(1, wanted), atol=1e-6, rtol=1e-6)
        assert all(len(set(of_token)) == len(of_token) for of_token in found.tolist())

    @pytest.mark.parametrize("normalised", [False, True])
    @pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
    @pytest.mark.parametrize("corrected", [False, True])
    @pytest.mark.parametrize(("tokens", "k", "experts"), CHOICES)
    def test_the_kernel_of_the_choice(
        seed: str, tokens: int, k: int, experts: int, corrected: bool, scores: str, normalised: bool
    ) -> None:
        routing = Routing(experts, k, scores, normalised, 2.5, corrected=corrected)
        logits = 3 * torch.randn(tokens, experts, device=DEVICE)
        correction = torch.randn(experts, device=DEVICE) if corrected else None
        found, wanted = (module.choose_experts(logits, correction, routing) for module in (choosing_triton, choosing))
        same_choice(logits, correction, scores, found[1].long(), wanted[1])
        torch.testing.assert_close(found[0], wanted[0], atol=1e-6, rtol=1e-5)

    @pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
    def test_experts_differ_whatever_the_logits_are(seed: str, scores: str) -> None:
        logits = torch.zeros(5, 6, device=DEVICE)
        logits[1], logits[2], logits[3], logits[4, :5] = torch.nan, -torch.inf, torch.inf, torch.nan
        weights, experts = choosing_triton.choose_experts(logits, None, Routing(6, 3, scores))
        assert weights.shape == (5, 3)
        for chosen in experts.tolist():
            assert len(set(chosen)) == 3 and all(0 <= expert < 6 for expert in chosen)
        assert experts[0].tolist() == [0, 1, 2]

    @pytest.mark.parametrize("corrected", [False, True])
    @pytest.mark.parametrize(("experts", "groups", "of_token", "k"), [(12, 4, 2, 3), (64, 8, 4, 8), (9, 3, 1, 3)])
    def test_the_kernel_chooses_within_groups(
        seed: str, experts: int, groups: int, of_token: int, k: int, corrected: bool
    ) -> None:
        routing = Routing(experts, k, "sigmoid", groups=groups, groups_per_token=of_token, corrected=corrected)
        logits = torch.randn(20, experts, device=DEVICE)
        correction = torch.randn(experts, device=DEVICE) if corrected else None
        found, wanted = (module.choose_experts(logits, correction, routing) for module in (choosing_triton, choosing))
        same_choice(logits, correction, "sigmoid", found[1].long(), wanted[1])
        torch.testing.assert_close(found[0], wanted[0], atol=1e-6, rtol=1e-5)

    @pytest.mark.parametrize("partly", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32])
    @pytest.mark.parametrize(("tokens", "k", "size"), [(1, 8, 700), (9, 2, 48), (30, 4, 1030), (0, 2, 16)])
    def test_the_kernel_of_sums(seed: str, tokens: int, k: int, size: int, dtype: torch.dtype, partly: bool) -> None:
        out, weights = torch.randn(tokens * k, size, device=DEVICE).to(dtype), torch.rand(tokens, k, device=DEVICE)
        row, offsets = torch.randperm(tokens * k, device=DEVICE).view(tokens, k), None
        if partly:
            offsets = torch.tensor([0, tokens * k // 2], dtype=torch.int32, device=DEVICE)
            out[tokens * k // 2 :] = torch.nan
        found = summing_triton.sum_experts(out, row.int(), weights, offsets)
        wanted = summing.sum_experts(out.double(), row, weights, offsets)
        assert found.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)
