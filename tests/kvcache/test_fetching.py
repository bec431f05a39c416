"""Values on the host come through a buffer of fetched chunks: the same answers, and only misses cross the bus."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from driver import DEVICE, SHAPE, Stream, decode, make_cache, prefill

from shadowkv.kvcache.decode.fetching import FetchCounts
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.compressed import CompressedBatch
from shadowkv.kvcache.parts.base import Selection
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.kvcache.presets import preset

SPECS = {
    "shadowkv": preset("shadowkv", rank=16, budget=64, outliers=3),
    "turbo-host": preset("turbo-host", rank=32, budget=64),
    "quest": preset("quest", budget=64, place="host"),
}
LENGTHS = [700, 20, 1500, 300, 2100]


def published(cache: KVCache) -> FetchCounts:
    """Counts of all steps so far: the device sends them when it gets to it, and no step waits."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return cache.fetches or FetchCounts()


@lru_cache
def run(spec: KVSpec, fetch_buffer: float, steps: int = 130) -> tuple[list[torch.Tensor], FetchCounts]:
    """Outputs of a ragged batch, some of it dense at first, while pages are compressed."""
    cache = make_cache(spec, fetch_buffer=fetch_buffer)
    assert (cache.fetches is not None) == (spec.place == "host" and fetch_buffer > 0)
    streams = [Stream(seed, cache.allocate(n, n + steps)) for seed, n in enumerate(LENGTHS)]
    prefill(cache, list(zip(streams, LENGTHS)))
    for _ in range(steps):
        decode(cache, streams)
    return [stream.output() for stream in streams], published(cache)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU adds in another order from batch size to batch size")
@pytest.mark.parametrize("fetch_buffer", [1, 1.3, 100, 0])
@pytest.mark.parametrize("name", SPECS)
def test_places_give_the_same_answers_bit_by_bit(name: str, fetch_buffer: float) -> None:
    got, _ = run(SPECS[name], fetch_buffer)
    wanted, _ = run(replace(SPECS[name], place="device"), 2)
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.equal(ours, theirs)


def test_a_larger_buffer_fetches_less_and_the_largest_every_chunk_once() -> None:
    counts = [run(SPECS["shadowkv"], fetch_buffer)[1] for fetch_buffer in (1, 2, 1000)]
    assert len({count.selected for count in counts}) == 1
    assert counts[0].fetched > counts[1].fetched > counts[2].fetched > 0
    for count in counts:
        assert count.fetched_bytes == count.fetched * 8 * SHAPE.head_dim * 4


def test_counts_are_those_of_the_selections() -> None:
    cache = make_cache(SPECS["shadowkv"])
    stream = Stream(5, cache.allocate(900, 940))
    prefill(cache, [(stream, 900)])
    assert cache.fetches == FetchCounts()
    seen: dict[tuple[int, int], set[int]] = {}
    selected = fetched = 0

    def watched(layer: int, q: torch.Tensor, batch: CompressedBatch, chosen: Selection) -> Selection:
        nonlocal selected, fetched
        for head, row in enumerate(chosen.chunks[0].tolist()):
            known = seen.setdefault((layer, head), set())
            selected += len(row)
            fetched += len(set(row) - known)
            known |= set(row)
        return chosen

    cache.selection_hook = watched
    decode(cache, [stream])
    decode(cache, [stream])  # the buffer holds all of two steps
    assert selected > fetched > 0
    counts = published(cache)
    assert (counts.selected, counts.fetched) == (selected, fetched)


def test_a_row_is_empty_for_its_next_sequence_and_kept_for_its_own_next_turn() -> None:
    cache = make_cache(SPECS["shadowkv"], slots=1, fetch_buffer=1000)
    outputs, rows = [], set()
    for seed in (1, 2):
        stream = Stream(seed, cache.allocate(1000, 1300))
        prefill(cache, [(stream, 1000)])
        buffer, row = cache.groups[0].store.buffer, stream.sequence.path[0].slot
        rows.add(row)
        assert (buffer.owner[:, row] == -1).all() and (buffer.entry[:, row] == -1).all()
        assert not buffer.used[:, row].any() and not buffer.step[:, row].any()
        for _ in range(20):
            decode(cache, [stream])
        before = (buffer.owner[:, row] >= 0).sum()
        assert before > 0
        # The newest tokens are forgotten, compressed ones never are: what was fetched is what it was.
        cache.truncate(stream.sequence, 1010)
        stream.length = 1010
        stream.k[:, 1010:] += 1
        prefill(cache, [(stream, 200)])
        assert (buffer.owner[:, row] >= 0).sum() == before
        for _ in range(20):
            decode(cache, [stream])
        outputs.append(stream.output())
        cache.release(stream.sequence)
    assert len(rows) == 1, "the second had a row of its own: the test would show nothing"
    alone = make_cache(replace(SPECS["shadowkv"], place="device"), slots=1)
    stream = Stream(2, alone.allocate(1000, 1300))
    prefill(alone, [(stream, 1000)])
    for _ in range(20):
        decode(alone, [stream])
    alone.truncate(stream.sequence, 1010)
    stream.length = 1010
    stream.k[:, 1010:] += 1
    prefill(alone, [(stream, 200)])
    for _ in range(20):
        decode(alone, [stream])
    torch.testing.assert_close(outputs[1], stream.output(), atol=1e-5, rtol=1e-4)


def test_rows_that_select_nothing_leave_the_buffer_alone() -> None:
    cache = make_cache(SPECS["shadowkv"])
    long, short = (Stream(seed, cache.allocate(n, n + 5)) for seed, n in enumerate((900, 20)))
    prefill(cache, [(long, 900), (short, 20)])
    decode(cache, [long, short])
    step, row = cache.groups[0].store.buffer.step, long.sequence.path[0].slot
    assert not short.sequence.path
    assert (step[:, row] == 1).all()
    assert step.sum() == step[:, row].sum()
