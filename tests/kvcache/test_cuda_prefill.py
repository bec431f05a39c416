"""Storing a prompt during its attention, on a stream of its own; needs a GPU."""

from typing import Any

import pytest
import torch
from driver import cache_of

from shadowkv.engine.execution.forward import BLOCK_TOKENS
from shadowkv.engine.execution.runner import Runner
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.decoder import Decoder
from shadowkv.models.filling import fill_dummy
from shadowkv.ops.apply_rope.tables import RopeConfig

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

SHAPE = ModelShape(num_layers=2, num_query_heads=6, num_kv_heads=2, head_dim=64)
ROPE = RopeConfig(64)
TOKENS = 3000
SLEEP = 100_000_000
"""Clock cycles of a GPU, about 50 ms."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BLOCK_TOKENS, "cuda", 1000)


def make(kv: str) -> tuple[KVCache, Runner, CachedSequence]:
    cache = cache_of(
        Layout(preset(kv), SHAPE, torch.bfloat16, 4096), ROPE, slots=4, memory=Blocks(device=300, host=300),
    )  # fmt: skip
    config = ModelConfig(
        architecture="llama", vocab_size=500, hidden_size=384, intermediate_size=512, num_layers=2, num_query_heads=6,
        num_kv_heads=2, head_dim=64, rms_norm_eps=1e-5, max_position=4096, rope=ROPE,
    )  # fmt: skip
    model = Decoder(config, torch.bfloat16, "cuda")
    fill_dummy(model)
    model.use(cache.ops)
    runner = Runner(model, cache)
    return cache, runner, cache.allocate(TOKENS, TOKENS + 64)


def slow_storing(cache: KVCache) -> None:
    with torch.cuda.stream(cache.groups[0].prefill.side):
        torch.cuda._sleep(SLEEP)


@torch.inference_mode()
def stored(kv: str, beside: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """All pages and states after a prefill, and the logits of the first step."""
    cache, runner, sequence = make(kv)
    if not beside:
        cache.groups[0].prefill.side = None
    prefill = runner.prefill([(sequence, [i % 500 for i in range(TOKENS)])])
    while True:
        if beside:
            slow_storing(cache)
        try:
            next(prefill)
        except StopIteration:
            break
    logits = runner.decode([sequence], [1])
    return {name: tier.arena.clone() for name, tier in cache.groups[0].store.tiers.items()}, logits


@pytest.mark.parametrize("kv", ["full", "shadowkv", "turbo", "turbo-host", "quest"])
def test_what_is_stored_beside_attention_is_what_is_stored_after_it(kv: str) -> None:
    (got, logits), (wanted, same_logits) = stored(kv, True), stored(kv, False)
    for name in wanted:
        assert torch.equal(got[name], wanted[name]), name
    assert torch.equal(logits, same_logits)


@torch.inference_mode()
def test_a_prefill_that_is_given_up_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, runner, sequence = make("turbo")
    write = cache.groups[0].storing.store_tokens

    def write_slowly(*args: Any) -> None:
        write(*args)
        torch.cuda._sleep(20 * SLEEP)

    monkeypatch.setattr(cache.groups[0].storing, "store_tokens", write_slowly)
    prefill = runner.prefill([(sequence, list(range(500)) * 6)], scored=True)
    for _ in range(6):
        next(prefill)  # the blocks of both layers, which are stored together during the last one
    assert not cache.groups[0].prefill.side.query(), "storing has ended already: the test would show nothing"
    prefill.close()
    torch.cuda.current_stream().synchronize()
    assert cache.groups[0].prefill.side.query()


@torch.inference_mode()
def overtaken(kv: str, beside: bool) -> list[torch.Tensor]:
    """What follows a long prompt and two short ones that were prefilled where it was paused, storing."""
    cache, runner, sequence = make(kv)
    if not beside:
        cache.groups[0].prefill.side = None
    long = runner.prefill([(sequence, [i % 500 for i in range(TOKENS)])], scored=True)
    short = [cache.allocate(n, n + 64) for n in (300, 420)]
    for piece in range(6):
        next(long)
        if piece == 2:  # the last block of the first layer, which is stored meanwhile
            if beside:
                slow_storing(cache)
            for _ in runner.prefill([(one, [7, 5, 3] * (n // 3)) for one, n in zip(short, (300, 420), strict=True)]):
                if beside:
                    slow_storing(cache)
    for _ in long:
        pass
    return [runner.decode([one], [1]) for one in (sequence, *short)]


@pytest.mark.parametrize("kv", ["full", "shadowkv", "turbo", "turbo:dense_below=400", "turbo-host"])
def test_a_short_prefill_where_a_long_one_is_stored_changes_neither(kv: str) -> None:
    for got, wanted in zip(overtaken(kv, True), overtaken(kv, False), strict=True):
        assert got.isfinite().all()
        assert torch.equal(got, wanted)
