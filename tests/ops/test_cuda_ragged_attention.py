"""PyTorch's flash attention over packed sequences, on a GPU, against the reference in float32."""

import pytest
import torch
from plain_formulas import SHAPES, assert_close_like_lowp
from test_ragged_attention import LENGTHS, packed

from shadowkv.ops.ragged_attention import cuda, reference, triton
from shadowkv.ops.registry import Ops

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


@pytest.mark.parametrize("backend", [cuda, triton], ids=["cuda", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("heads", "group", "dim"), [*SHAPES, (8, 4, 128)])
@pytest.mark.parametrize("lengths", [*LENGTHS, [1500, 2, 700, 1024]], ids=str)
def test_packed_sequences_see_themselves_alone(
    seed: str, heads: int, group: int, dim: int, lengths: list[int], dtype: torch.dtype, backend: object
) -> None:
    args = packed(lengths, heads, group, dim, dtype)
    exact = reference.ragged_attention(*(x.double() for x in args[:3]), *args[3:])
    assert_close_like_lowp(backend.ragged_attention(*args), exact, reference.ragged_attention(*args))


def test_the_host_does_not_wait(seed: str) -> None:
    args = packed([100, 1, 300], 2, 4, 128, torch.bfloat16)
    for backend in (cuda, triton):
        backend.ragged_attention(*args)  # compiled
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            backend.ragged_attention(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_flash_attention_is_what_16_bits_get() -> None:
    assert Ops("cuda").backends["ragged_attention"] == "cuda"
