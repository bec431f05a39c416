"""What attention over selected chunks in CUDA refuses, by name, and what it makes of no chunks."""

from dataclasses import replace

import pytest
import torch
from test_cuda_attend_selected import codec_of, problem

from shadowkv.ops.attend_selected import cuda
from shadowkv.ops.case import Case

if cuda.missing():
    pytest.skip("needs a CUDA device and the attend_selected library", allow_module_level=True)

CASE = Case(
    frozenset({"attend_selected"}),
    torch.bfloat16,
    head_dim=128,
    num_query_heads=32,
    num_kv_heads=8,
    rope_dim=128,
    rank=160,
    key_codec=17,
    value_codec=2,
    block_memory=101376,
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float16}, "float16 is not bfloat16"),
        ({"num_query_heads": 136}, "17 query heads per kv head are more than 16"),
        ({"chunk": 32}, "chunk size 32 is not 1, 2, 4, 8 or 16"),
        ({"rope_dim": 24}, "RoPE rotates 24 of 128 dimensions in halves; the kernel needs a multiple of 16"),
        ({"interleaved": True}, "in neighbours"),
        ({"rank": 48}, "rank 48"),
        ({"head_dim": 80, "rope_dim": 80}, "head dim 80"),
        ({"head_dim": 96, "rope_dim": 96}, "codec 2 have no head dim 96"),
        ({"head_dim": 256, "rope_dim": 256, "rank": 256}, "bytes of shared memory, and can have 101376"),
        ({"key_codec": 1234}, "keys in codec 1234 with values in codec 2"),
        ({"value_codec": 1234}, "keys in codec 17 with values in codec 1234"),
    ],
)
def test_what_there_is_no_kernel_for_is_refused_by_name(change, reason):
    assert cuda.supports(CASE) == []
    (told,) = cuda.supports(replace(CASE, **change))
    assert reason in told


@pytest.mark.parametrize(
    ("values", "fields", "reason"),
    [
        ("2-bit codes", {}, "no kernel for keys in codec 16 with values in codec 3"),
        ("rows", {"interleaved": True}, "RoPE rotates 64 of 64 dimensions in neighbours"),
        ("rows", {"rotary_dim": 24}, "RoPE rotates 24 of 64 dimensions in halves"),
        ("rows", {"rank": 48}, "rank 48 is not a multiple of 32 up to 256"),
    ],
)
def test_calls_are_refused_for_the_reason_told_beforehand(values, fields, reason):
    args = problem(2, 4, 64, "bf16", values, tokens=[900, 300], **fields)
    rope, codec = args[1].rotary.config, codec_of(values)
    case = replace(
        CASE, head_dim=64, num_query_heads=8, num_kv_heads=2, rope_dim=rope.dim, interleaved=rope.interleaved,
        rank=fields.get("rank", 64), key_codec=16, value_codec=codec.id if codec else 0,
    )  # fmt: skip
    (told,) = cuda.supports(case)
    assert reason in told
    with pytest.raises((RuntimeError, ValueError), match=reason):
        cuda.attend_selected(*args)


def test_an_unknown_codec_is_refused(seed):
    q, keys, values, selected = problem(2, 4, 128, "int8", "4-bit codes", tokens=[900, 300], rank=160)
    unknown = type("Unknown", (type(keys.codec),), {"id": 1234})()
    with pytest.raises(RuntimeError, match="no kernel for keys in codec 1234 with values in codec 1"):
        cuda.attend_selected(q, replace(keys, codec=unknown), values, selected)


def test_nothing_selected(seed):
    q, keys, values, selected = problem(2, 4, 128, "int8", "rows", tokens=[900, 300], rank=160)
    out, lse = cuda.attend_selected(q, keys, values, selected[..., :0])
    assert not out.any()
    assert (lse == -torch.inf).all()
