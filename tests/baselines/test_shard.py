"""Low-rank keys of mixed widths (Shard): their bytes, how bits are allocated, what a policy takes."""

import weakref
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import driver
import pytest
import torch
from driver import DEVICE, SHAPE, Stream, compressed_batch, decode, make_cache, prefill
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shadowkv.baselines.shard import WIDTHS, MixedLatents, allocate
from shadowkv.kvcache.codecs.latents import Int4Latents
from shadowkv.kvcache.parts import build_parts, resolve
from shadowkv.kvcache.parts.base import CompressedTokens
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.presets import preset
from shadowkv.ops.apply_rope.reference import halves, rope_by
from shadowkv.ops.apply_rope.tables import RopeConfig
from shadowkv.ops.attend_selected.reference import gather_selected

CODEC = MixedLatents()
LLAMA_8B = ModelShape(num_layers=32, num_query_heads=32, num_kv_heads=8, head_dim=128)


def widths_of(*widths: int) -> torch.Tensor:
    return torch.tensor(widths, dtype=torch.uint8)


def test_with_four_bits_everywhere_the_bytes_are_those_of_weak_latents() -> None:
    latents = 5 * torch.randn(3, 50, 12)
    fours = torch.full((12,), 4, dtype=torch.uint8)
    stored = CODEC.encode(latents, fours)
    assert torch.equal(stored, Int4Latents(0).encode(latents))
    assert torch.equal(CODEC.decode(stored, 12, fours), Int4Latents(0).decode(stored, 12))
    assert CODEC.encode(torch.tensor([-7.0, 7.0]), widths_of(4, 4)).tolist() == [0xF1]
    assert CODEC.encode(torch.tensor([-9.0, 9.0]), widths_of(4, 4)).tolist() == [0xF1]  # and never 0x00


@pytest.mark.parametrize("widths", [(8, 6, 2, 0), (6, 6, 4, 0), (2, 6, 8, 0), (6, 2, 6, 2), (0, 0, 8, 8), (0, 0, 0, 0)])
def test_every_code_of_any_widths_comes_back(widths: tuple[int, ...]) -> None:
    most = [max(0, 2 ** (width - 1) - 1) if width else 0 for width in widths]
    latents = torch.cat([torch.randint(-one, one + 1, (500, 1)) for one in most], dim=1).float()
    latents[0], latents[1] = torch.tensor(most).float(), -torch.tensor(most).float()
    stored = CODEC.encode(latents, widths_of(*widths))
    assert stored.shape == (500, 2) and stored.dtype == torch.uint8
    assert torch.equal(CODEC.decode(stored, 4, widths_of(*widths)).float(), latents)


def test_each_state_has_its_widths() -> None:
    both = torch.stack((widths_of(8, 4, 4, 0), widths_of(6, 6, 2, 2)))[:, None]
    latents = torch.tensor([1.0, -1.0, 1.0, 0.0]).expand(2, 5, 4)
    assert torch.equal(CODEC.decode(CODEC.encode(latents, both), 4, both).float(), latents)


@pytest.mark.parametrize(
    ("variance", "budget", "penalty", "widths"),
    [
        ((100, 10, 1), 12, 4.0, (6, 4, 2)), ((1, 1, 1), 12, 4.0, (4, 4, 4)),
        ((100, 1), 4, 4.0, (2, 2)), ((100, 1), 4, 1.0, (4, 0)), ((100, 1), 0, 4.0, (0, 0)), ((1, 1), 99, 4.0, (8, 8)),
    ],
)  # fmt: skip
def test_bits_of_the_documents_examples(
    variance: tuple[int, ...], budget: int, penalty: float, widths: tuple[int, ...]
) -> None:
    found = allocate(torch.tensor([variance]), budget, group=1, drop_penalty=penalty)
    assert found.tolist() == [list(widths)]


def test_no_allocation_costs_less() -> None:
    variance = torch.rand(20, 10).pow(4).sort(1, descending=True).values
    sizes = torch.tensor([4, 4, 2])
    of_groups = torch.stack([part.sum(1) for part in variance.split(4, dim=1)], dim=1)
    all_widths = torch.tensor(list(product(WIDTHS, repeat=3)))
    cost = of_groups[:, None] * torch.where(all_widths > 0, 1 / (3 * 4.0**all_widths), 4.0)
    least = cost.sum(2).masked_fill((all_widths * sizes).sum(1) > 40, torch.inf).amin(1)
    found = allocate(variance, 40, group=4)
    assert (found.int().sum(1) <= 40).all()
    chosen = torch.where(found > 0, 1 / (3 * 4.0**found), 4.0)
    torch.testing.assert_close((variance * chosen).sum(1), least)


@pytest.mark.parametrize(
    ("tokens", "mebibytes"),
    [(2048, 36.0), (4096, 58.0), (8192, 102.0), (16384, 190.0), (32768, 366.0), (131072, 1422.0)],
)
def test_sizes_that_the_document_claims(tokens: int, mebibytes: float) -> None:
    """Llama-3.1-8B; 68 exact tokens, as the document counts, and no rounding to pages."""
    spec = resolve(preset("shard", rank=192), LLAMA_8B)
    parts = build_parts(spec, LLAMA_8B, torch.bfloat16)
    assert [part.bytes_per_token() for part in parts] == [96, 0, 256]
    state = sum(field.nbytes for part in parts for field in part.state_fields())
    total = 32 * ((tokens - 68) * (96 + 256) + 68 * 4096 + state)
    assert total == pytest.approx(mebibytes * 2**20, rel=0.01)
    if tokens == 8192:
        assert tokens * 4096 * 32 / total >= 10.0


def decaying(stream: Stream) -> None:
    """Makes the stream's keys of directions that fall by a factor of 20, about a mean."""
    mixing = torch.linalg.qr(torch.randn(SHAPE.kv_dim, SHAPE.kv_dim)).Q.to(DEVICE)
    fall = torch.logspace(0, -1.3, SHAPE.kv_dim, device=DEVICE)
    keys = stream.k.flatten(2) * fall @ mixing + 3
    stream.k.copy_(keys.view_as(stream.k))


def rebuilt_error(kv: str) -> float:
    torch.manual_seed(0)
    cache = make_cache(preset(kv))
    stream = Stream(1, cache.allocate(700, 800))
    decaying(stream)
    prefill(cache, [(stream, 700)])
    batch = compressed_batch(cache, [stream])
    every = torch.arange(int(batch.num_chunks), device=DEVICE).expand(1, SHAPE.num_kv_heads, -1)
    rows = gather_selected(cache.parts.keys.source(cache.groups[0].store, 0, batch), every)[0].transpose(0, 1)
    rotary = cache.groups[0].store.rotary
    angles = (table[: len(rows)].unsqueeze(1) for table in (rotary.cos, rotary.sin))
    exact = rope_by(stream.k[0, : len(rows)], *angles, rotary)
    return float((rows - exact).norm() / exact.norm())


def test_bits_go_where_the_variance_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocate, "__defaults__", (8, 4.0))
    monkeypatch.setattr("shadowkv.kvcache.codecs.latents.STRONG", 0)
    mixed, flat = (rebuilt_error(f"full:keys=low-rank-{kind},rank=32") for kind in ("mixed", "int4"))
    assert mixed < 0.6 * flat < 0.1


def test_tokens_that_come_later_are_stored_like_the_prompt() -> None:
    cache = make_cache(preset("shard"))
    stream = Stream(3, cache.allocate(500, 700))
    prefill(cache, [(stream, 500)])
    while stream.length < 610:
        decode(cache, [stream])
    assert stream.sequence.compressed > 500
    assert stream.output().isfinite().all()


def test_scores_are_sums_over_frequencies_of_latents() -> None:
    """Shard's fused scores: only the distance is rotated, and the mean is under the same angles."""
    config = RopeConfig(head_dim=16, theta=10000.0)
    q, basis, mean = torch.randn(16).double(), torch.randn(6, 16).double(), 3 * torch.randn(16).double()
    latents, at = torch.randn(40, 6).double(), 77
    angles = torch.arange(128).double()[:, None] / 10000.0 ** (torch.arange(0, 16, 2).double() / 16)

    def with_rope(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        (x, y), (cos, sin) = halves(rows, config), (angles[positions].cos(), angles[positions].sin())
        return torch.cat((x * cos - y * sin, y * cos + x * sin), dim=-1)

    wanted = with_rope(latents @ basis + mean, torch.arange(40)) @ with_rope(q, torch.tensor(at))
    a, b = halves(q, config)

    def along_and_across(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        c, e = halves(rows, config)
        return a * c + b * e, b * c - a * e

    along, across = (x + y for x, y in zip(along_and_across(mean), (latents @ z for z in along_and_across(basis))))
    distance = angles[1] * (torch.arange(40) - at).double()[:, None]
    got = (along * distance.cos() + across * distance.sin()).sum(1)
    torch.testing.assert_close(got, wanted, atol=1e-10, rtol=1e-10)


class PeakBytes(TorchDispatchMode):
    """The peak bytes, at any one time, of tensors made since."""

    def __init__(self) -> None:
        super().__init__()
        self.known, self.now, self.most = weakref.WeakSet[Any](), 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and (made := x.untyped_storage()) not in given | set(self.known):
                self.known.add(made)
                self.now += made.nbytes()
                weakref.finalize(made, self._gone, made.nbytes())
        self.most = max(self.most, self.now)
        return out

    def _gone(self, count: int) -> None:
        self.now -= count


@pytest.mark.parametrize("own", [False, True])
def test_compressing_and_reading_take_what_is_left_free_for_them(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of one state and of many, more than are projected at a time; rows of a step, each with a state."""
    monkeypatch.setattr(driver, "SHAPE", replace(SHAPE, head_dim=64))
    monkeypatch.setattr(driver, "ROPE", RopeConfig(64))
    count = 90
    cache = make_cache(preset("full:keys=low-rank-mixed,rank=96"), slots=count)
    part, shape = cache.parts.keys, (2, count, 64, 2, 64)
    pages, rows = torch.arange(count, device=DEVICE), torch.randn(shape, device=DEVICE)
    tokens = CompressedTokens(slice(None), pages if own else pages[:1], 64 * pages, pages, pages, rows, rows, rows)
    with PeakBytes() as peak:
        part.compress(cache.groups[0].store, tokens)
    assert peak.most <= part.compression_bytes()
    assert cache.ops.backends["project_latents"] != "reference" or part.compression_bytes() < 3 * peak.most
    with PeakBytes() as peak:
        part.source(
            cache.groups[0].store, 0, SimpleNamespace(states=pages, pages=pages[:, None], first=pages)
        ).decoded()
    assert 0.5 * count * part.reading_bytes() < peak.most <= count * part.reading_bytes()
