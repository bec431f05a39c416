"""Tiers: blocks that are handed out, and the views of pages in them."""

import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowkv.kvcache.memory.arenas import GRANULE, Blocks, Field, OutOfBlocks, Tier, page_bytes

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.bool, torch.int64)
EXACT = (Field("k", (2, 64, 8), torch.bfloat16), Field("v", (2, 64, 8), torch.bfloat16))
COMPRESSED = (
    Field("latents", (8, 8, 5), torch.bfloat16),
    Field("landmarks", (2, 8, 8), torch.bfloat16),
    Field("excluded", (2, 8), torch.bool),
)

fields = st.lists(
    st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from(DTYPES)), min_size=1, max_size=5
).map(lambda drawn: tuple(Field(f"f{i}", tuple(shape), dtype) for i, (shape, dtype) in enumerate(drawn)))


def noise(field: Field) -> torch.Tensor:
    """Random bits of a field's shape and dtype."""
    if field.dtype == torch.bool:
        return torch.randint(0, 2, field.shape).bool()
    size = field.dtype.itemsize
    raw = torch.randint(0, 256, (*field.shape[:-1], field.shape[-1] * size), dtype=torch.uint8)
    return raw.view(field.dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Bytes, so that NaNs compare equal to themselves."""
    return x.contiguous().view(torch.uint8)


def fill(tier: Tier, layout: tuple[Field, ...], granules: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Writes noise to every field of every page in every layer: (view of it, what was written)."""
    written = []
    for name, layers in tier.views(layout).items():
        field = next(field for field in layout if field.name == name)
        assert len(layers) == tier.num_layers
        for view in layers:
            assert view.shape[1:] == field.shape
            assert view.dtype == field.dtype
            for granule in granules:
                value = noise(field)
                view[granule] = value
                written.append((view[granule], value))
    return written


def pages_of(blocks: list[int], layout: tuple[Field, ...], block_bytes: int) -> list[int]:
    """Granules of all pages of ``layout`` that fit in ``blocks``."""
    size = page_bytes(layout)
    return [block + i * size // GRANULE for block in blocks for i in range(block_bytes // size)]


@settings(deadline=None)
@given(layout=fields)
def test_page_bytes_hold_every_field_padded_to_16_and_are_whole_granules(layout):
    for field in layout:
        raw = torch.empty(field.shape, dtype=field.dtype).nbytes
        assert raw <= field.nbytes < raw + 16
        assert field.nbytes % 16 == 0
    total = sum(field.nbytes for field in layout)
    assert total <= page_bytes(layout) < total + GRANULE
    assert page_bytes(layout) % GRANULE == 0


def test_a_page_without_fields_has_no_bytes():
    assert page_bytes(()) == 0


@settings(deadline=None, max_examples=40)
@given(layout=fields, layers=st.integers(1, 3), blocks=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_fields_of_pages_never_overlap(layout, layers, blocks, seed):
    torch.manual_seed(seed)
    tier = Tier("device", layers, page_bytes(layout), blocks, CPU)
    written = fill(tier, layout, tier.allocate(blocks))
    assert len(written) == layers * blocks * len(layout)
    for view, value in written:
        assert torch.equal(bits(view), bits(value))


@settings(deadline=None, max_examples=40)
@given(exact=fields, compressed=fields, blocks=st.integers(2, 5), seed=st.integers(0, 2**32 - 1))
def test_blocks_may_hold_exact_or_several_compressed_pages_side_by_side(exact, compressed, blocks, seed):
    torch.manual_seed(seed)
    block_bytes = max(page_bytes(exact), page_bytes(compressed))
    tier = Tier("device", 2, block_bytes, blocks, CPU)
    granules = tier.allocate(blocks)
    random.Random(seed).shuffle(granules)
    ours = pages_of(granules[: blocks // 2], compressed, block_bytes)
    written = fill(tier, compressed, ours) + fill(tier, exact, granules[blocks // 2 :])
    for view, value in written:
        assert torch.equal(bits(view), bits(value))


def test_writing_pages_leaves_other_blocks_alone(seed):
    size = page_bytes(EXACT)
    assert size // page_bytes(COMPRESSED) >= 2
    tier = Tier("device", 2, size, 5, CPU)
    taken = tier.allocate(5)
    random.Random(seed).shuffle(taken)
    fill(tier, EXACT, taken[:2])
    fill(tier, COMPRESSED, pages_of(taken[2:3], COMPRESSED, size))
    for granule in taken[3:]:
        assert not tier.arena[:, granule * GRANULE : granule * GRANULE + size].any()


def test_a_released_block_may_come_back_as_the_other_kind_of_page(seed):
    size = page_bytes(EXACT)
    tier = Tier("device", 2, size, 2, CPU)
    first, second = tier.allocate(2)
    kept = fill(tier, EXACT, [second])
    fill(tier, EXACT, [first])
    tier.release([first])
    assert tier.allocate(1) == [first]
    kept += fill(tier, COMPRESSED, pages_of([first], COMPRESSED, size))
    for view, value in kept:
        assert torch.equal(bits(view), bits(value))


def test_views_start_aligned_for_vector_loads():
    tier = Tier("device", 2, page_bytes(COMPRESSED), 3, CPU)
    for layers in tier.views(COMPRESSED).values():
        for view in layers:
            assert view.data_ptr() % 16 == 0
            assert view.stride(0) * view.dtype.itemsize == GRANULE


def test_a_new_tier_is_zero_and_free():
    tier = Tier("device", 3, 512, 7, CPU)
    assert not tier.arena.any()
    assert (tier.free_blocks, tier.num_blocks, tier.used_bytes) == (7, 7, 0)
    assert tier.bytes_per_block == 3 * 512


def test_allocation_and_release_keep_count_of_distinct_blocks(seed):
    draw = random.Random(seed)
    tier = Tier("device", 2, 768, 23, CPU)
    held: list[int] = []
    for _ in range(300):
        if held and draw.random() < 0.5:
            draw.shuffle(held)
            count = draw.randint(1, len(held))
            tier.release(held[:count])
            del held[:count]
        else:
            wanted, free = draw.randint(0, 9), tier.free_blocks
            if wanted > free:
                with pytest.raises(OutOfBlocks):
                    tier.allocate(wanted)
            else:
                new = tier.allocate(wanted)
                assert len(new) == wanted
                held += new
        assert len(set(held)) == len(held)
        assert all(granule % 3 == 0 and 0 <= granule < 23 * 3 for granule in held)
        assert tier.free_blocks == 23 - len(held)
        assert tier.used_bytes == len(held) * 2 * 768


def test_out_of_pages_takes_nothing_and_names_the_numbers():
    tier = Tier("host", 1, 256, 5, CPU)
    tier.allocate(3)
    with pytest.raises(OutOfBlocks, match=r"3 .*host.*2 of 5"):
        tier.allocate(3)
    assert tier.free_blocks == 2
    assert len(tier.allocate(2)) == 2
    with pytest.raises(OutOfBlocks):
        tier.allocate(1)
    assert tier.allocate(0) == []


def test_every_tier_has_a_spare_block_that_is_never_handed_out():
    for blocks in (0, 3):
        tier = Tier("host", 2, page_bytes(COMPRESSED), blocks, CPU)
        assert tier.spare not in tier.allocate(blocks)
        assert tier.free_blocks == 0
        fill(tier, COMPRESSED, [tier.spare])


def test_a_tier_may_have_blocks_of_no_bytes_if_it_has_none_of_them():
    nothing = Tier("host", 2, 0, 0, CPU)
    assert nothing.views(()) == {}
    nothing.release(nothing.allocate(0))
    assert nothing.used_bytes == 0


def test_a_tier_that_cannot_be_allocated_says_how_much_it_wanted():
    with pytest.raises(MemoryError, match=r"1073741824\.0 GiB for the device tier"):
        Tier("device", 1, 2**20, 2**40, CPU)


def test_pinned_memory_that_is_refused_is_given_back_and_named(monkeypatch):
    pinned: list[int] = []

    class Runtime:
        """Refuses the third slab."""

        def cudaHostRegister(self, start, size, flags):
            if len(pinned) == 2:
                return 2  # cudaErrorMemoryAllocation
            pinned.append(start)
            return 0

        def cudaHostUnregister(self, start):
            pinned.remove(start)

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr("shadowkv.kvcache.memory.arenas.SLAB", 2**20)
    with pytest.raises(MemoryError, match=r"for the host tier of the KV cache: CUDA error 2 after pinning 2 of 5 "):
        Tier("host", 1, 2**20, 4, torch.device("cuda"), pinned=True)
    assert not pinned


def test_a_block_is_free_once_nobody_holds_it(seed):
    draw, tier = random.Random(seed), Tier("device", 1, 768, 9, CPU)
    owners: list[list[int]] = []
    for _ in range(300):
        choice = draw.random()
        if choice < 0.3 and tier.free_blocks:
            owners.append(tier.allocate(draw.randint(1, tier.free_blocks)))
        elif choice < 0.6 and owners:  # shares some of another owner's
            shared = draw.choice(owners)
            owners.append(draw.sample(shared, draw.randint(1, len(shared))))
            tier.retain(owners[-1])
        elif owners:
            tier.release(owners.pop(draw.randrange(len(owners))))
        held = Counter(block for owner in owners for block in owner)
        assert tier.free_blocks == 9 - len(held)
        assert all(tier.references(block) == held[block] for block in range(0, 27, 3))


def test_what_nobody_holds_can_neither_be_given_back_nor_be_shared():
    tier = Tier("host", 1, 768, 3, CPU)
    (block,) = tier.allocate(1)
    tier.retain([block])
    tier.release([block, block])
    with pytest.raises(AssertionError, match=f"block {block} of the host tier was given back twice"):
        tier.release([block])
    other = next(name for name in (0, 3, 6) if name != block)
    with pytest.raises(AssertionError, match=f"block {other} of the host tier is held by no sequence"):
        tier.retain([other])


def test_pages_lie_in_the_block_that_begins_before_them():
    tier = Tier("device", 1, 5 * GRANULE, 4, CPU)
    assert [tier.block_of(name) for name in (0, 4, 5, 9, 19)] == [0, 0, 5, 5, 15]
    assert tier.blocks_of([9, 4, 5, 0, 19]) == [5, 0, 15]
    states = Tier("states", 1, 5 * GRANULE, 4, CPU, paged=False)
    assert states.allocate(4) == [0, 1, 2, 3]
    assert states.spare == 4


def test_numbers_of_blocks_by_tier_and_what_is_not_named_is_none_of():
    have = Blocks(device=3, states=1)
    assert have["host"] == 0
    assert "host" not in have
    assert have + Blocks(host=2) - Blocks(device=1) == Blocks(device=2, states=1, host=2)
    assert Blocks(device=3).within(have)
    assert not Blocks(host=1).within(have)
    assert Blocks(host=0).within(have)
    assert (str(have), str(Blocks(host=0))) == ("3 device, 1 states", "nothing")
