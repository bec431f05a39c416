"""A later turn on a GPU against the references over the same stored bytes; needs a GPU."""

import pytest
import torch
from driver import DEVICE, Stream, cache_of, decode, decode_part, prefill, scatter

from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.ops.apply_rope.tables import RopeConfig
from shadowkv.ops.attend_selected.reference import gather_selected
from shadowkv.ops.dense_attention import reference
from shadowkv.ops.registry import NAMES

if DEVICE != "cuda":
    pytest.skip("needs a GPU", allow_module_level=True)

SHAPE = ModelShape(num_layers=2, num_query_heads=6, num_kv_heads=2, head_dim=64)
DTYPE = torch.bfloat16
REFERENCES = dict.fromkeys(NAMES, "reference")


def stored(cache: KVCache, stream: Stream) -> torch.Tensor:
    """Keys and values float32 [L, 2, H, m, d] of all that is cached, exact ones instead of their approximations."""
    batch = decode_part(cache, [stream]).compressed
    cached, layers = cache.snapshots.export(stream.sequence).arrays(), []
    tail = cached["tail"].transpose(2, 3).float()
    if batch is None:
        return tail
    static = cached["segments.0.static"].transpose(2, 3).float()
    assert "segments.1.static" not in cached
    every = torch.arange(int(batch.num_chunks), device=DEVICE).expand(1, SHAPE.num_kv_heads, -1)
    for layer in range(SHAPE.num_layers):
        keep = ~cache.groups[0].store.excluded(layer, batch.pages, batch.first)[0].repeat_interleave(
            cache.spec.chunk, dim=1
        )
        sources = [part.source(cache.groups[0].store, layer, batch) for part in (cache.parts.keys, cache.parts.values)]
        compressed = [gather_selected(source, every)[0].float() for source in sources]
        layers.append(torch.stack([x[keep].unflatten(0, (SHAPE.num_kv_heads, -1)) for x in compressed]))
    return torch.cat((torch.stack(layers), static, tail), dim=3)


@pytest.mark.parametrize("at_once", [2, 7, 512])
@pytest.mark.parametrize("kv", ["full", "turbo", "turbo:values=rotated-3bit", "turbo-host", "shadowkv", "quest"])
def test_new_tokens_attend_to_everything_cached(kv: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import driver

    monkeypatch.setattr(driver, "SHAPE", SHAPE)
    monkeypatch.setattr("shadowkv.kvcache.compression.rebuilt.SPAN_PAGES", at_once)
    cache = cache_of(
        Layout(preset(kv), SHAPE, DTYPE, 4096), RopeConfig(64), slots=8, memory=Blocks(device=400, host=400),
    )  # fmt: skip
    scatter(cache, seed=3)
    for seed, (length, steps, new) in enumerate([(3000, 70, 90), (900, 1, 1), (200, 20, 300), (1500, 0, 700)]):
        stream = Stream(seed, cache.allocate(length, 4000))
        for name in ("q", "k", "v"):
            setattr(stream, name, getattr(stream, name).to(DTYPE))
        prefill(cache, [(stream, length)])
        for _ in range(steps):
            decode(cache, [stream])
        rows = slice(stream.length, stream.length + new)
        before = stored(cache, stream)
        prompts = cache.prefill_batch([(stream.sequence, new)])
        block, (batch,) = prompts.block(0, new), prompts.groups
        for layer in range(SHAPE.num_layers):
            cache.append(layer, stream.k[layer, rows], stream.v[layer, rows], block)
            got = cache.start(layer, stream.q[layer, rows], block)()
            q = cache.ops.apply_rope(stream.q[layer, rows], batch.positions, cache.groups[0].store.rotary)
            index = batch.scratch_index(layer)
            own = [x[index].float() for x in (batch.rope_keys, batch.values)]
            k, v = (torch.cat((old.transpose(0, 1), new)) for old, new in zip(before[layer], own))
            exact, _ = reference.partial(q.float(), k, v, True)
            low, _ = reference.partial(q, k.to(DTYPE), v.to(DTYPE), True)
            error, allowed = (got - exact).abs().max(), 2 * (low - exact).abs().max() + 2**-7 * exact.abs().max()
            assert error <= allowed, f"off by {error:.3g}, allowed {allowed:.3g}"
        cache.release(stream.sequence)


@pytest.mark.parametrize("kv", ["turbo-host", "shadowkv"])
def test_new_tokens_beside_a_new_sequence(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch whose first sequence is stored on another stream while the second reads the host on a third."""
    import driver

    monkeypatch.setattr(driver, "SHAPE", SHAPE)
    monkeypatch.setattr("shadowkv.kvcache.compression.rebuilt.SPAN_PAGES", 5)
    outs = []
    for backends in (None, REFERENCES):
        cache = cache_of(
            Layout(preset(kv), SHAPE, DTYPE, 4096), RopeConfig(64), slots=8, memory=Blocks(device=400, host=400),
            backends=backends,
        )  # fmt: skip
        old, new = (Stream(seed, cache.allocate(3000, 3500)) for seed in range(2))
        for stream in (old, new):
            for name in ("q", "k", "v"):
                setattr(stream, name, getattr(stream, name).to(DTYPE))
        prefill(cache, [(old, 3000)])
        prefill(cache, [(new, 1000), (old, 200)])
        prefill(cache, [(new, 100), (old, 100)])
        outs.append(torch.cat([stream.output().float() for stream in (old, new)]))
    error = (outs[0] - outs[1]).flatten(1).norm(dim=1) / outs[1].flatten(1).norm(dim=1)
    assert error.mean() < 0.02, error
