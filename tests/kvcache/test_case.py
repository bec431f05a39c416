"""What is known about a cache's ops before it is built: which are called, and with what."""

from dataclasses import replace

import driver
import pytest
import torch
from driver import DEVICE, ROPE, SHAPE, Stream, decode, make_cache, prefill
from noted_calls import noted_calls

from shadowkv.kvcache.case import case_of, choose_ops, with_other_heads
from shadowkv.kvcache.policy.shape import FULL, Heads, LayerKind, ModelShape
from shadowkv.kvcache.presets import PRESETS, preset
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.ops.apply_rope.tables import RopeConfig
from shadowkv.ops.attend_selected import cuda_sm90
from shadowkv.ops.registry import Ops
from shadowkv.ops.sketch_queries.cpu import missing

MORE = ["turbo:values=dense", "turbo:chunk=8,index=sketch-1bit", "shadowkv:index=chunk-mean-fp8"]


@pytest.mark.parametrize("kv", [*PRESETS, *MORE])
def test_the_ops_that_are_called_are_those_that_the_parts_name(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rope = RopeConfig(64)
    monkeypatch.setattr(driver, "SHAPE", replace(SHAPE, head_dim=64))  # which all codecs take
    monkeypatch.setattr(driver, "ROPE", rope)
    cache = make_cache(preset(kv, budget=None if preset(kv).index == "none" else 64))
    assert cache.ops.called == case_of(cache.layout, rope, torch.device(DEVICE)).ops
    called = noted_calls(cache.ops, monkeypatch)
    stream = Stream(0, cache.allocate(900, 1000))
    prefill(cache, [(stream, 900)])
    prefill(cache, [(Stream(seed, cache.allocate(5, 5)), 5) for seed in (1, 2)])
    for _ in range(70):  # more than a page: one is compressed on the way
        decode(cache, [stream])
    decode(cache, [stream], drafting=cache.spec.drafts)
    cache.extend(stream.sequence, stream.length + 100, stream.length + 110)
    prefill(cache, [(stream, 100)])
    called.add("gather_context")  # called by prompts beside a step
    called.add("write_rows")  # called by parts that write rows as they come, and for the host
    assert called == cache.ops.called | (set() if cache.spec.compresses else {"write_rows"})


def test_the_numbers_of_a_case() -> None:
    shape, rope = ModelShape(2, 32, 8, 128), RopeConfig(128, rotary_dim=64, interleaved=True)
    case = case_of(Layout(preset("turbo-host"), shape, torch.bfloat16, 65536 + 32), rope, torch.device("cpu"))
    assert (case.dtype, case.head_dim, case.group) == (torch.bfloat16, 128, 4)
    assert (case.rope_dim, case.interleaved) == (64, True)
    assert (case.chunk, case.rank, case.key_codec, case.value_codec) == (8, 160, 18, 2)
    assert case.latent_width == 32 + 128 // 2  # bytes: a byte for the 32 strongest, half of one for each other
    assert (case.max_pages, case.max_selected) == (1024, 65536 // 64 // 8 + 1)
    assert case.fetched_bytes == 8 * 48
    assert (case.capability, case.block_memory) == (None, 0)


@pytest.mark.parametrize(
    ("kv", "reason"),
    [
        ("turbo", None),
        ("turbo:index=none", None),
        ("turbo:values=rotated-4bit", None),
        ("turbo-host", "values are on the host"),
        ("turbo:key_groups=2,rank=128", "latents of 96 bytes do not have 32 dimensions in 8 bits and the others in 4"),
        ("turbo:values=dense", "codec 0 of values does not have equal steps"),
        ("turbo:keys=low-rank-int8", "codec 17 of keys is not low-rank-int4"),
        ("turbo:rank=192", "rank 192 is not 32, 64, 96, 128 or 160"),
    ],
)
def test_policies_that_the_kernel_for_hopper_takes(kv: str, reason: str | None) -> None:
    """As a case tells, whatever the machine: Llama-3.1-8B's attention."""
    shape, rope = ModelShape(32, 32, 8, 128), RopeConfig(128)
    case = case_of(Layout(preset(kv), shape, torch.bfloat16, 65536), rope, torch.device("cpu"))
    reasons = cuda_sm90.supports(case)
    assert reasons == [] if reason is None else reason in reasons


def test_what_layers_and_sampler_call_is_of_the_case() -> None:
    layout = Layout(preset("full"), SHAPE, torch.float32, 4096)
    own, ops = (choose_ops(layout, ROPE, "cpu", also) for also in ((), ("rms_norm", "sample_tokens")))
    assert ops.called - own.called == {"rms_norm", "sample_tokens"}
    forced = choose_ops(layout, ROPE, "cpu", backends={"paged_attention": "reference"})
    assert forced.backends == {**own.backends, "paged_attention": "reference"}


def test_nothing_is_said_of_compressed_pages_where_there_are_none() -> None:
    case = case_of(make_cache(preset("full")).layout, ROPE, torch.device("cpu"))
    assert (case.max_pages, case.fetched_bytes) == (0, 0)
    assert "attend_selected" not in case.ops
    assert case.group == SHAPE.group


def test_windows_with_heads_of_their_own_are_a_case_of_their_own() -> None:
    window, rope = LayerKind(64, RopeConfig(512), Heads(8, 4, 512)), RopeConfig(128)
    shape = ModelShape(4, 8, 2, 128, (window, FULL, window, FULL))
    layout = Layout(preset("turbo"), shape, torch.float32, 4096)
    first = case_of(layout, rope, torch.device("cpu"))
    (case,) = with_other_heads(layout, first)
    assert (case.head_dim, case.num_kv_heads, case.rope_dim) == (512, 4, 512)
    of_windows = {"paged_window_attention", "dense_attention.windowed"}
    assert of_windows <= case.ops and not of_windows & first.ops
    assert not {"attend_selected", "paged_attention"} & case.ops
    ops = choose_ops(layout, rope, "cpu")
    assert ops.case is not None and ops.case.head_dim == 128
    assert ops.called == ops.case.ops | case.ops


def test_a_backend_supports_every_case_that_calls_it() -> None:
    """The C++ kernel of this op takes heads of up to 256."""
    reason = "cpu: head dim 512 is above 256"
    small = replace(case_of(make_cache(preset("turbo")).layout, ROPE, torch.device("cpu")), ops=frozenset({"rms_norm"}))
    calls, large = replace(small, ops=frozenset({"sketch_queries"})), replace(small, head_dim=512)
    reasons = [
        Ops("cpu", case, others=[other]).reasons["sketch_queries"]
        for case, other in ((calls, replace(calls, head_dim=512)), (calls, large))
    ]
    assert (reason in reasons[0]) == (not missing())
    assert reason not in reasons[1]
