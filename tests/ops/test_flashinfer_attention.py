"""What surrounds FlashInfer: its layouts and logarithms, and a FlashInfer that does not run. Its kernels need a GPU."""

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shadowkv.ops import flashinfer_attention
from shadowkv.ops.block_attention import flashinfer as of_blocks
from shadowkv.ops.block_attention import reference
from shadowkv.ops.causal_attention import flashinfer as causal
from shadowkv.ops.causal_attention.reference import causal_attention

DIM = flashinfer_attention.DIM


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """A FlashInfer in PyTorch; what it is given."""
    given = []

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, return_lse: bool) -> tuple[Tensor, Tensor]:
        assert return_lse
        assert q.is_contiguous()
        given.append(q.shape)
        out, lse = reference.block_attention(q, k.transpose(0, 1), v.transpose(0, 1), causal)
        return out, lse / math.log(2)

    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(single_prefill_with_kv_cache=attend))
    return given


@pytest.mark.parametrize("heads_first", [False, True])
def test_it_is_asked_in_its_own_layout_and_logarithm(calls: list[torch.Size], heads_first: bool) -> None:
    q, (k, v) = torch.randn(5, 4, DIM).bfloat16(), torch.randn(2, 2, 9, DIM).bfloat16()
    if heads_first:
        got, wanted = of_blocks.block_attention(q, k, v, True), reference.block_attention(q, k, v, True)
        torch.testing.assert_close(got, wanted)
    else:
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        torch.testing.assert_close(causal.causal_attention(q, k, v), causal_attention(q, k, v), atol=0.02, rtol=0.02)
    assert calls == [q.shape]


def test_one_that_does_not_run_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(flashinfer_attention, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(flashinfer_attention.torch, "randn", lambda *shape, **kwargs: torch.zeros(shape))
    monkeypatch.setattr(flashinfer_attention, "attend", fails)
    flashinfer_attention.available.cache_clear()
    with pytest.warns(UserWarning, match="PyTorch's attention does: no compiler"):
        assert not flashinfer_attention.available()
    flashinfer_attention.available.cache_clear()
