"""Any policy of coded rows that attends to everything: steps are attention over what was decoded, in every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import driver
import pytest
import torch
from coded_rows import gaussian_rows
from driver import DEVICE, SHAPE, Stream, decode, decode_part, make_cache, prefill
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shadowkv.kvcache.codecs import ROW_CODECS
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.compressed import CompressedBatch
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables
from shadowkv.ops.attend_coded import reference
from shadowkv.ops.attend_selected.reference import gather_selected

ROPES = (RopeConfig(64), RopeConfig(64, rotary_dim=32, interleaved=True))
AXES = ("keys", "values")
CODED = {axis: st.sampled_from([name for name, codec in ROW_CODECS.items() if axis in codec.axes]) for axis in AXES}


@st.composite
def policies(draw: st.DrawFn) -> KVSpec:
    keys, values = (draw(CODED[axis]) for axis in AXES)
    dense = draw(st.sampled_from((None, None, "keys", "values")))
    spec = KVSpec(
        keys=keys,
        values=values,
        place=draw(st.sampled_from(("device", "host"))),
        chunk=draw(st.sampled_from((1, 8, 16))),
        local=draw(st.sampled_from((1, 32, 70))),
        settings={"keys.centred": draw(st.booleans())},
    )
    if dense == "keys":
        return spec.changed(keys="dense")
    return replace(spec, values="dense") if dense == "values" else spec


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    spec=policies(),
    rope=st.sampled_from(ROPES),
    turns=st.lists(st.lists(st.integers(1, 450), min_size=1, max_size=3), min_size=1, max_size=3),
    steps=st.integers(1, 70),
)
def test_steps_attend_to_what_was_decoded(spec: KVSpec, rope: RopeConfig, turns: list[list[int]], steps: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "SHAPE", replace(SHAPE, head_dim=64))
        patch.setattr(driver, "ROPE", rope)
        longest = max(map(sum, turns)) + steps + 1
        cache = make_cache(spec, max_model_len=longest)
        streams = [Stream(i, cache.allocate(counts[0], sum(counts) + steps + 1)) for i, counts in enumerate(turns)]
        for stream, counts in zip(streams, turns, strict=True):
            stream.k += 2 * gaussian_rows(2, 64).to(DEVICE)  # a mean for each head
            for turn, count in enumerate(counts):
                if turn:
                    cache.extend(stream.sequence, stream.length + count, stream.sequence.capacity)
                prefill(cache, [(stream, count)])
        for _ in range(steps):
            decode(cache, streams)
        check_a_step(cache, streams)


def check_a_step(cache: KVCache, streams: list[Stream]) -> None:
    """The next step's outputs against plain attention, and the op's against the reference's."""
    batch, op, calls = (
        decode_part(cache, streams),
        cache.ops.attend_coded,
        0,
    )

    def watched(*arguments: Any) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        out, lse = op(*arguments)
        wanted, wanted_lse = reference.attend_coded(*arguments)
        torch.testing.assert_close(out, wanted, atol=5e-5, rtol=5e-5)
        torch.testing.assert_close(lse, wanted_lse, atol=5e-5, rtol=5e-5)
        return out, lse

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache.ops, "attend_coded", watched)
        decode(cache, streams)
    assert calls == (SHAPE.num_layers if batch.compressed is not None else 0)
    tables = RotaryTables(driver.ROPE, driver.MAX_LEN, DEVICE)
    for layer in range(SHAPE.num_layers):
        decoded = {} if batch.compressed is None else decoded_rows(cache, layer, batch.compressed)
        for stream in streams:
            positions = torch.arange(stream.length, device=DEVICE)
            q, k = (cache.ops.apply_rope(x[layer, : stream.length], positions, tables) for x in (stream.q, stream.k))
            v = stream.v[layer, : stream.length].clone()
            for segment in stream.sequence.path:
                begin, end = segment.first, segment.first + 64 * len(segment.pages)
                exact = 0 if begin else cache.spec.static_tokens
                for rows, found in zip((k, v), decoded[segment.slot], strict=True):
                    rows[begin + exact : end] = found[exact : end - begin]
            scores = torch.einsum("hgd,nhd->hgn", q[-1].unflatten(0, (2, 3)), k) / 8
            wanted = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v).flatten(0, 1)
            torch.testing.assert_close(stream.outputs[-1][0, layer], wanted, atol=1e-4, rtol=1e-4)


def decoded_rows(cache: KVCache, layer: int, compressed: CompressedBatch) -> dict[int, list[Tensor]]:
    """Keys and values [n, H, d] of the segments of a batch, by the rows of these."""
    every = torch.arange(compressed.pages.shape[1] * 64 // cache.spec.chunk, device=DEVICE).expand(
        len(compressed.slots), 2, -1
    )
    every = every.masked_fill(every >= compressed.num_chunks[:, None, None], 0)  # past their end they may be anywhere
    sources = (part.source(cache.groups[0].store, layer, compressed) for part in (cache.parts.keys, cache.parts.values))
    rows = [gather_selected(source, every).transpose(1, 2) for source in sources]
    return {int(name): [x[i] for x in rows] for i, name in enumerate(compressed.slots)}
