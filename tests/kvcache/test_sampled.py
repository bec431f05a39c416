"""A budget that is partly sampled: how it is split, and what that improves where attention is spread thin."""

import numpy as np
import pytest
import torch
from driver import SHAPE, Stream, compressed_batch, decode, make_cache, prefill
from torch import Tensor

from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.compressed import CompressedBatch
from shadowkv.kvcache.parts import build_parts, resolve
from shadowkv.kvcache.parts.base import IndexPart, Selection
from shadowkv.kvcache.presets import PRESETS, preset
from shadowkv.ops.sampling import CAUTION, row_seeds

S, STEPS = 3000, 70


def outputs(kv: str, sharpness: float) -> torch.Tensor:
    """Outputs of decode steps only, [steps, layers, H_q, d]."""
    cache = make_cache(preset(kv))
    stream = Stream(5, cache.allocate(S, S + STEPS))
    stream.q *= sharpness
    stream.v = stream.k.clone()  # tokens that are found have other values than most
    prefill(cache, [(stream, S)])
    for _ in range(STEPS):
        decode(cache, [stream])
    return stream.output()[S:]


def test_samples_mend_attention_that_is_spread_thin_and_cost_little_where_it_is_not() -> None:
    errors = {}
    top_k, sampled = "exact-top-k:index=sketch,budget=256", "exact-top-k:index=sketch,budget=256,sampled=0.5"
    for sharpness in (0.3, 1.0, 4.0):
        exact = outputs("full", sharpness)
        for kv in (top_k, sampled):
            errors[sharpness, kv] = float((outputs(kv, sharpness) - exact).norm() / exact.norm())
    assert errors[0.3, sampled] < 0.5 * errors[0.3, top_k]
    assert errors[1.0, sampled] < 0.8 * errors[1.0, top_k]
    assert errors[4.0, sampled] < errors[4.0, top_k] + 0.1  # sketches of 16 dimensions say little of a weight


def index(**changed: float) -> IndexPart:
    """The index of ``turbo`` with changed fields."""
    return build_parts(resolve(preset("turbo", **changed), SHAPE), SHAPE, torch.float32).index


def test_nothing_is_sampled_where_all_could_be_found() -> None:
    budget, compressed = np.array([300, 300, 300]), np.array([64, 320, 6400])
    assert index(sampled=0.4).sampled_chunks(budget, compressed).tolist() == [0, 120, 120]
    assert index(sampled=0.4, chunk=8).sampled_chunks(np.array([38]), np.array([6400])).tolist() == [38 - 23]
    assert index(sampled=0.0).sampled_chunks(budget, compressed).tolist() == [0, 0, 0]
    assert index(sampled=0.7).sampled_chunks(np.array([640]), np.array([64000])).tolist() == [448]


@pytest.mark.parametrize(
    ("kv", "reason"),
    [
        ("turbo-host:sampled=0.5", "every step samples other chunks"),
        ("exact-top-k:sampled=0.5", r"sampled=0\.5 has no meaning with index='exact'; index that have it: sketch$"),
        ("turbo:mass=0.9", r"mass=0\.9 has no meaning with index='sketch'; .* have it: .*exact.*min-max, pca, skewed"),
        ("turbo:index=sketch-1bit,chunk=8,sampled=0.5", "sampled=0.5 has no meaning with index='sketch-1bit'"),
        ("full:sampled=0.5", "sampled=0.5 has no meaning with index='none'"),
        ("turbo:sampled=1.0", r"sampled=1\.0 must be in \[0, 1\)"),
        ("turbo:sampled=0.5,budget=256,chunk=0", "chunk=0 does not divide"),
    ],
)
def test_what_cannot_be_sampled_from_is_refused(kv: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        resolve(preset(kv), SHAPE)


def test_every_index_names_what_it_found_in_order() -> None:
    for kv in (
        "exact-top-k",
        "quest",
        "shadowkv:place=device",
        "loki",
        "turbo:sampled=0.0",
        "turbo:index=sketch-1bit,chunk=8",
    ):
        cache = make_cache(preset(kv, budget=256))
        stream = Stream(7, cache.allocate(S, S + 1))
        prefill(cache, [(stream, S)])
        batch = compressed_batch(cache, [stream])
        selected = cache.parts.index.select(cache.groups[0].store, 0, stream.q[:1, S], batch).chunks
        assert (selected.diff(dim=-1) > 0).all() and (selected >= 0).all()


@pytest.mark.parametrize("kv", ["turbo:budget=256", "turbo:budget=256,sampled=0.9", "turbo:budget=512,chunk=4"])
def test_a_step_selects_nearly_all_of_its_budget(kv: str) -> None:
    """Probabilities sum to nearly all of what is sampled: at least ``CAUTION`` of it where none would be above 1."""
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


@pytest.mark.parametrize("kv", [kv for kv, spec in PRESETS.items() if spec.selects])
def test_no_row_selects_more_than_the_batch_says(kv: str) -> None:
    """Kernels share out work by it."""
    cache = make_cache(preset(kv, **({"budget": 0.1} if PRESETS[kv].budget else {})))
    most, lengths = [], [700, 1500]
    cache.selection_hook = lambda layer, q, batch, selected: most.append((batch.most, selected.chunks)) or selected
    streams = [Stream(seed, cache.allocate(length, length + 3)) for seed, length in enumerate(lengths)]
    prefill(cache, list(zip(streams, lengths, strict=True)))
    for _ in range(3):
        decode(cache, streams)
    assert len(most) >= 3 * SHAPE.num_layers
    for bound, chunks in most:
        assert ((chunks >= 0).sum(-1) <= bound[:, None]).all()


def test_rows_sample_the_same_alone_and_in_a_batch() -> None:
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


class Seen:
    """What a cache's index has selected, in order, and the seeds of its rows."""

    def __init__(self, cache: KVCache) -> None:
        self.chunks: list[Tensor] = []
        self.seeds: list[Tensor] = []
        cache.selection_hook = self._see

    def _see(self, layer: int, q: Tensor, batch: CompressedBatch, selected: Selection) -> Selection:
        self.chunks.append(selected.chunks)
        assert batch.sampling is not None
        self.seeds.append(batch.sampling.seeds)
        return selected

    def of_row(self, row: int) -> list[Tensor]:
        """Numbers of the chunks of every step and layer."""
        return [chunks[row][chunks[row] >= 0] for chunks in self.chunks]


def alike(one: list[Tensor], other: list[Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]


def forked(cache: KVCache, parent: Stream, seeds: list[int]) -> list[Stream]:
    """Sequences that continue alike after what ``parent`` has compressed, each with a seed."""
    at = cache.fork_point(parent.sequence, parent.length)
    children = [parent.going_on(cache.fork(parent.sequence, at, S, S + 20), at, parent) for _ in seeds]
    for child, seed in zip(children, seeds, strict=True):
        child.sequence.seed = seed
        prefill(cache, [(child, S - at)])
    return children


def test_answers_of_one_prompt_miss_other_tokens_and_a_seed_repeats() -> None:
    cache = make_cache(preset("turbo:budget=128"))
    parent = Stream(3, cache.allocate(S, S + 20))
    prefill(cache, [(parent, S)])
    seen, streams = Seen(cache), forked(cache, parent, [7, 8, 7, -7])
    for _ in range(4):
        decode(cache, streams)
    first, second, again, third = map(seen.of_row, range(4))
    assert all(alike(first, again))
    assert not any(alike(first, second)) and not any(alike(first, third)) and not any(alike(second, third))
    steps = torch.stack(seen.seeds)[:: SHAPE.num_layers, 0]
    assert len(steps.unique()) == len(steps)  # every step has a different sample


def test_rows_select_the_same_bit_by_bit_alone_and_in_any_batch() -> None:
    cache, lengths = make_cache(preset("turbo:budget=128")), [900, 2000, 1300, 640, 1999, 3000, 700]
    streams = [Stream(number, cache.allocate(n, n + 5)) for number, n in enumerate(lengths)]
    for stream, length in zip(streams, lengths, strict=True):
        stream.sequence.seed = 2**63 + length
        prefill(cache, [(stream, length)])

    def select(some: list[Stream], layer: int) -> Selection:
        q = torch.stack([stream.q[layer, stream.length] for stream in some])
        return cache.parts.index.select(cache.groups[0].store, layer, q, compressed_batch(cache, some))

    select(streams, 0)  # compresses what is due in all of them
    for layer in range(SHAPE.num_layers):
        for together in (streams[:2], streams):
            batch = select(together, layer)
            for row, stream in enumerate(together):
                (alone,), (own_weight,) = vars(select([stream], layer)).values()
                width = alone.shape[-1]
                assert torch.equal(batch.chunks[row, :, :width], alone) and (batch.chunks[row, :, width:] == -1).all()
                there = alone >= 0
                assert torch.equal(batch.log_weight[row, :, :width][there], own_weight[there])


def test_a_slot_forgets_the_seed_of_the_sequence_that_had_it() -> None:
    cache = make_cache(preset("turbo:budget=128"), slots=1)
    sequence = cache.allocate(100, 100)
    assert sequence.seed == 0
    for seed, kept in ((5, 5), (-1, 2**64 - 1), (2**64 + 3, 3)):
        sequence.seed = seed
        assert sequence.seed == kept
    cache.trim(sequence)
    cache.extend(sequence, 100, 120)
    assert sequence.seed == 3
    cache.release(sequence)
    assert cache.allocate(100, 100).seed == 0


def test_plans_carry_seeds_of_segments_and_what_fills_them_up_has_one() -> None:
    cache = make_cache(preset("turbo:budget=128"))
    stream = Stream(4, cache.allocate(500, 1300))
    prefill(cache, [(stream, 500)])
    cache.extend(stream.sequence, 1200, 1300)
    prefill(cache, [(stream, 700)])
    stream.sequence.seed = 9
    other, dense = Stream(5, cache.allocate(700, 701)), Stream(6, cache.allocate(9, 10))
    prefill(cache, [(other, 700), (dense, 9)])
    plan = cache.plan_decode([stream.sequence, other.sequence, dense.sequence])
    assert plan.groups[0].segments.sequence.tolist() == [0, 0, 1]  # a prompt after a short one has a state of its own
    wanted = row_seeds(np.array([9, 9, 0], np.uint64), np.array([1200, 1200, 700]), plan.groups[0].segments.first)
    assert plan.groups[0].segments.seed.tolist() == wanted.tolist() and len(set(wanted.tolist())) == 3
    wide = cache.rounded(plan, 8)
    (batch,) = cache.decode_batch(wide, torch.from_numpy(wide.packed()).to(cache.device)).groups[0]
    assert batch.compressed is not None and batch.compressed.sampling is not None
    seeds = batch.compressed.sampling.seeds.tolist()
    assert seeds[:3] == wanted.tolist() and seeds[3:] == [0]
