"""A budget part of which is drawn: how it is split, and what it mends where attention is spread thin."""

import numpy as np
import pytest
import torch
from driver import SHAPE, Stream, decode, make_cache, prefill, sealed_batch

from shadowkv.kvcache.presets import preset
from shadowkv.ops.select_by_sketch.draws import CAUTION

S, STEPS = 3000, 70


def outputs(kv: str, sharpness: float) -> torch.Tensor:
    """Of decode steps alone, [steps, layers, H_q, d]."""
    cache = make_cache(preset(kv))
    stream = Stream(5, cache.allocate(S, S + STEPS))
    stream.q *= sharpness
    stream.v = stream.k.clone()  # tokens that are found have other values than most
    prefill(cache, [(stream, S)])
    for _ in range(STEPS):
        decode(cache, [stream])
    return stream.output()[S:]


def test_draws_mend_attention_that_is_spread_thin_and_cost_little_where_it_is_not() -> None:
    errors = {}
    found, drawn = "exact-top-k:index=sketch,budget=256", "exact-top-k:index=sketch,budget=256,drawn=0.5"
    for sharpness in (0.3, 1.0, 4.0):
        exact = outputs("full", sharpness)
        for kv in (found, drawn):
            errors[sharpness, kv] = float((outputs(kv, sharpness) - exact).norm() / exact.norm())
    assert errors[0.3, drawn] < 0.5 * errors[0.3, found]
    assert errors[1.0, drawn] < 0.8 * errors[1.0, found]
    assert errors[4.0, drawn] < errors[4.0, found] + 0.1  # sketches of 16 dimensions say little of a weight


def test_nothing_is_drawn_where_all_could_be_found() -> None:
    budget, sealed = np.array([300, 300, 300]), np.array([64, 320, 6400])
    assert preset("turbo", drawn=0.4, budget=300).drawn_chunks(budget, sealed).tolist() == [0, 120, 120]
    spec = preset("turbo", drawn=0.4, budget=300, chunk=8)
    assert spec.drawn_chunks(np.array([38]), np.array([6400])).tolist() == [38 - 23]
    assert preset("turbo", drawn=0.0).drawn_chunks(budget, sealed).tolist() == [0, 0, 0]
    assert preset("turbo", drawn=0.7).drawn_chunks(np.array([640]), np.array([64000])).tolist() == [448]


@pytest.mark.parametrize(
    ("kv", "reason"),
    [
        ("turbo-host:drawn=0.5", "drawn chunks are others at every step"),
        ("exact-top-k:drawn=0.5,mass=0.9", "drawn=0.5 is a share of a budget, and mass=0.9 takes less"),
        ("shadowkv:place=device,drawn=0.5", "index='chunk-mean' draws no chunks"),
        ("turbo:index=sketch-1bit,chunk=8", "index='sketch-1bit' draws no chunks"),
        ("full:drawn=0.5", "index='none' attends to every token"),
        ("turbo:drawn=1.0", "drawn=1.0 must be in"),
        ("turbo:drawn=0.5,budget=256,chunk=0", "chunk=0 does not divide"),
    ],
)
def test_what_cannot_be_drawn_from_is_refused(kv: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        preset(kv).resolve(SHAPE)


def test_every_index_names_what_it_found_in_order() -> None:
    for kv in ("exact-top-k", "quest", "shadowkv:place=device", "loki", "turbo", "turbo:index=sketch-1bit,chunk=8"):
        cache = make_cache(preset(kv, budget=256, drawn=0.0))
        stream = Stream(7, cache.allocate(S, S + 1))
        prefill(cache, [(stream, S)])
        batch = sealed_batch(cache, [stream])
        selected = cache.parts.index.select(cache.store, 0, stream.q[:1, S], batch).chunks
        assert (selected.diff(dim=-1) > 0).all() and (selected >= 0).all()


@pytest.mark.parametrize("kv", ["turbo:budget=256", "turbo:budget=256,drawn=0.9", "turbo:budget=512,chunk=4"])
def test_a_step_selects_nearly_all_of_its_budget(kv: str) -> None:
    """Chances add up to all but a little of what is drawn: at least ``CAUTION`` of it where none would be above 1."""
    cache, seen = make_cache(preset(kv)), []
    cache.selection_hook = lambda layer, q, batch, selected: seen.append(selected.chunks) or selected
    stream = Stream(9, cache.allocate(S, S + 8))
    stream.q[:, S:] *= 0.3
    prefill(cache, [(stream, S)])
    for _ in range(8):
        decode(cache, [stream])
    assert len(seen) == 8 * SHAPE.num_layers
    for chunks in seen:
        assert ((chunks >= 0).sum(-1) >= int(CAUTION * cache.spec.budget / cache.spec.chunk)).all()


def test_rows_draw_the_same_alone_and_in_a_batch() -> None:
    spec, alone = preset("turbo:budget=128"), []
    lengths = [900, 2000]
    for seed, length in enumerate(lengths):
        cache = make_cache(spec)
        stream = Stream(seed, cache.allocate(length, length + 5))
        prefill(cache, [(stream, length)])
        for _ in range(5):
            decode(cache, [stream])
        alone.append(stream.output()[length:])
    cache = make_cache(spec)
    streams = [Stream(seed, cache.allocate(length, length + 5)) for seed, length in enumerate(lengths)]
    prefill(cache, list(zip(streams, lengths, strict=True)))
    for _ in range(5):
        decode(cache, streams)
    for stream, length, wanted in zip(streams, lengths, alone, strict=True):
        torch.testing.assert_close(stream.output()[length:], wanted, atol=1e-4, rtol=1e-3)
