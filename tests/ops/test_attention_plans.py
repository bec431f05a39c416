"""Prefill attention on a GPU asks for few plans, whatever prompts there are, and all of them can be made before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shadowkv.ops.block_attention import reference as block
from shadowkv.ops.causal_attention import reference
from shadowkv.ops.fused_attention import LARGE, SPAN, STEP, UNIT, spans
from shadowkv.ops.merge_attention import reference as merge

pytest.importorskip("triton")

from shadowkv.ops.causal_attention import cuda

LONGEST = 249_856 + 64


def large(q: Tensor, keys: int) -> bool:
    """As on a Hopper."""
    return len(q) * keys >= LARGE


@pytest.fixture
def plans(monkeypatch) -> set[tuple[int, int, bool]]:
    """Queries, keys and mask of what is asked of cuDNN; nothing is computed."""
    asked = set()

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[None]:
        n, m = len(q), k.shape[1]
        if (n == m if causal else m % STEP == 0) and large(q, m):
            more = -n % STEP
            asked.add((n + more, m + more if causal else m, causal))
        return (None,)

    monkeypatch.setattr(cuda, "is_large", large)
    monkeypatch.setattr(cuda, "attend", attend)
    monkeypatch.setattr(cuda.merge, "merge_attention", lambda parts: None)
    return asked


def call(n: int, m: int) -> None:
    q, k = (torch.empty(count, 1, 8, dtype=torch.bfloat16, device="meta") for count in (n, m))
    cuda.causal_attention(q, k, k)


@pytest.mark.parametrize("longest", [100, 4100, UNIT, UNIT + 700, 61_504, LONGEST])
def test_every_plan_of_a_prompt_is_made_beforehand(plans, longest: int) -> None:
    block = torch.empty(UNIT, 1, 8, dtype=torch.bfloat16, device="meta")
    for shape in cuda.planned(block, longest):
        call(*shape)
    before = set(plans)
    assert len(before) <= 140 and bool(before) == (longest > 4096)
    for length in {*range(1, longest, 1531), longest}:
        for start in range(0, length, UNIT):
            stop = min(start + UNIT, length)
            call(stop - start, stop)
    assert plans == before


def test_later_turns_ask_for_few_more(plans) -> None:
    for cached in range(0, LONGEST - 3000, 997):
        call(3000, cached + 3000)
    assert len(plans) <= SPAN // UNIT + UNIT // STEP - 1


@pytest.mark.parametrize("keys", [0, STEP, UNIT, UNIT + STEP, SPAN, SPAN + STEP, 3 * SPAN + 5 * UNIT + 7 * STEP])
def test_spans_are_all_keys_in_order(keys: int) -> None:
    assert [key for span in spans(keys) for key in range(span.start, span.stop, STEP)] == [*range(0, keys, STEP)]


def test_attention_in_parts_is_attention(monkeypatch) -> None:
    monkeypatch.setattr(cuda, "is_large", lambda q, keys: True)
    monkeypatch.setattr(cuda, "attend", lambda q, k, v, causal=False: block.block_attention(q, k, v, causal))
    monkeypatch.setattr(cuda.merge, "merge_attention", merge.merge_attention)
    q = torch.randn(6, 2, 8, dtype=torch.float64)
    k, v = torch.randn(2, UNIT + 2 * STEP + 9, 1, 8, dtype=torch.float64)
    torch.testing.assert_close(cuda.causal_attention(q, k, v), reference.causal_attention(q, k, v))
