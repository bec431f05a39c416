"""Batches of dense and compressed sequences: on a CPU only the compressed ones are searched and read sparsely."""

import pytest
import torch
from driver import DEVICE, SHAPE, Stream, decode, decode_part, make_cache, plain_attention, prefill
from torch import Tensor

from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.compressed import CompressedBatch
from shadowkv.kvcache.parts.base import Selection
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.kvcache.presets import preset

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's shapes do not depend on which rows are dense")

SPECS = {
    "shadowkv": preset("shadowkv", rank=16, budget=64, outliers=3),
    "turbo": preset("turbo", rank=32, budget=64, values="rotated-4bit"),
    "quest": preset("quest", budget=64),
}
LENGTHS = [20, 900, 70, 1500]
CASES = [("shadowkv", 0), ("shadowkv", 2), ("turbo", 0), ("quest", 0)]
"""Policies, and how large a buffer of values on the host is."""


def filled(spec: KVSpec, fetch_buffer: float, lengths: list[int]) -> tuple[KVCache, list[Stream]]:
    cache = make_cache(spec, fetch_buffer=fetch_buffer)
    streams = [Stream(n, cache.allocate(n, n + 200)) for n in lengths]
    prefill(cache, list(zip(streams, lengths)))
    return cache, streams


@pytest.mark.parametrize(("name", "fetch_buffer"), CASES)
def test_each_row_answers_as_it_does_alone(name: str, fetch_buffer: float) -> None:
    cache, streams = filled(SPECS[name], fetch_buffer, LENGTHS)
    alone = [filled(SPECS[name], fetch_buffer, [length]) for length in LENGTHS]
    for _ in range(3):
        decode(cache, streams)
        for other, (stream,) in alone:
            decode(other, [stream])
    for stream, (_, (other,)) in zip(streams, alone):
        torch.testing.assert_close(stream.output()[-3:], other.output()[-3:], atol=1e-4, rtol=1e-4)
    for dense in (streams[0], streams[2]):
        torch.testing.assert_close(dense.output(), plain_attention(dense), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "fetch_buffer"), CASES)
def test_only_compressed_rows_are_searched(name: str, fetch_buffer: float) -> None:
    cache, streams = filled(SPECS[name], fetch_buffer, LENGTHS)
    searched = []

    def watched(layer: int, q: Tensor, batch: CompressedBatch, selected: Selection) -> Selection:
        assert len(q) == len(batch.slots) == len(batch.pages) == len(batch.budget) == len(selected.chunks)
        searched.append(batch.slots.tolist())
        return selected

    cache.selection_hook = watched
    decode(cache, streams)
    decode(cache, [streams[3], streams[1]])
    decode(cache, [streams[0], streams[2]])
    first, second = (streams[n].sequence.path[0].slot for n in (1, 3))
    layers = SHAPE.num_layers
    assert searched == [[first, second]] * layers + [[second, first]] * layers


def test_a_row_is_searched_from_the_step_on_that_it_is_compressed_in() -> None:
    cache, streams = filled(SPECS["quest"], 0, [70, 900])
    rows = []
    for _ in range(120):
        batch = decode_part(cache, streams)
        rows.append(None if batch.sequence is None else batch.sequence.tolist())
        decode(cache, streams)
    change = rows.index(None)
    assert rows == [[1]] * change + [None] * (len(rows) - change)
    assert 70 + change == cache.spec.dense_limit
