"""The cache with its CUDA kernels against the same cache with the references; needs a GPU."""

import pytest
import torch
from driver import DEVICE, Stream, cache_of, decode, prefill, scatter

from shadowkv.engine.execution.cuda_graphs import CudaGraphs
from shadowkv.kvcache.decode.decode_batch import DecodePlan
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.presets import PRESETS, preset
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.ops.apply_rope.tables import RopeConfig
from shadowkv.ops.registry import NAMES

if DEVICE != "cuda":
    pytest.skip("needs a GPU", allow_module_level=True)

SHAPE = ModelShape(num_layers=2, num_query_heads=6, num_kv_heads=2, head_dim=64)
LENGTHS = [3000, 900, 200, 1500]
STEPS = 150


def run(kv: str, backends: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    import driver

    monkeypatch.setattr(driver, "SHAPE", SHAPE)
    # Half of the tokens are selected, so that a near tie that falls the other way changes little.
    spec = preset(kv, budget=None if preset(kv).index == "none" else 0.5)
    cache = cache_of(
        Layout(spec, SHAPE, torch.bfloat16, 4096), RopeConfig(64), slots=8, memory=Blocks(device=400, host=400),
        backends=backends,
    )  # fmt: skip
    scatter(cache, seed=3)
    streams = [Stream(seed, cache.allocate(n, n + STEPS)) for seed, n in enumerate(LENGTHS)]
    for stream in streams:
        for name in ("q", "k", "v"):
            setattr(stream, name, getattr(stream, name).bfloat16())
        prefill(cache, [(stream, LENGTHS[streams.index(stream)])])
    for _ in range(STEPS - 1):
        decode(cache, streams)
    return [stream.output().float() for stream in streams]


CHANGED = [
    "turbo:index=none",
    "turbo:values=rotated-3bit",
    "turbo-host:values=rotated-3bit",
    "turbo:sampled=0.0",
    "turbo:chunk=4,sampled=0.25",
    "turboquant-4:centred=true",
    "turboquant-3:place=host",
]


@pytest.mark.parametrize("kv", [*sorted(PRESETS), *CHANGED])
def test_kernels_and_references_agree_while_pages_are_compressed(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Any basis of a subspace is as good as any other, but rounds its latents differently: both use the same.
    got = run(kv, {"low_rank_basis": "reference"}, monkeypatch)
    wanted = run(kv, dict.fromkeys(NAMES, "reference"), monkeypatch)
    for ours, theirs, length in zip(got, wanted, LENGTHS, strict=True):
        ours, theirs = ours[length:], theirs[length:]
        assert ours.isfinite().all()
        error = (ours - theirs).flatten(1).norm(dim=1) / theirs.flatten(1).norm(dim=1)
        # References in bfloat16 are off float32 ones by 0.016 on average and 0.06 at most, and a near tie that falls
        # the other way, as scores are rounded differently, makes 0.3 of a single row. A wrong chunk is off by 1.
        assert error.median() < 0.05, error
        assert error.mean() < 0.1, error


@pytest.mark.parametrize("kv", ["shadowkv", "turbo-host"])
def test_captured_steps_with_a_buffer_that_evicts_equal_eager_ones_without(
    kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import driver

    monkeypatch.setattr(driver, "SHAPE", SHAPE)
    lengths, steps = [3000, 900, 200, 1500, 2000, 2500, 1000, 700, 3500], 70  # a row pads the captured batch
    caches = []
    for fetch_buffer in (0, 1):
        spec = preset(kv, budget=512)
        cache = cache_of(
            Layout(spec, SHAPE, torch.bfloat16, 4096, fetch_buffer), RopeConfig(64), slots=9,
            memory=Blocks(device=800, host=800),
        )  # fmt: skip
        streams = [Stream(seed, cache.allocate(n, n + steps)) for seed, n in enumerate(lengths)]
        for stream, length in zip(streams, lengths):
            for name in ("q", "k", "v"):
                setattr(stream, name, getattr(stream, name).bfloat16())
            prefill(cache, [(stream, length)])
        caches.append((cache, streams))
    (plain, wanted), (cache, streams) = caches
    q, k, v = (torch.stack([getattr(s, name) for s in streams], dim=1) for name in ("q", "k", "v"))  # [L, B, S, ...]

    def step(
        plan: DecodePlan, numbers: torch.Tensor, inputs: torch.Tensor, prompts: None, dry_run: bool
    ) -> torch.Tensor:
        batch, outs = cache.decode_batch(plan, numbers), []
        (part,) = batch.groups[0]
        for layer in range(1 if dry_run else SHAPE.num_layers):
            at = layer, inputs[0], part.positions
            cache.append(layer, k[at], v[at], batch)
            outs.append(cache.start(layer, q[at], batch)())
        outs *= SHAPE.num_layers // len(outs)
        return torch.stack(outs, dim=1).flatten(1)

    columns = SHAPE.num_layers * SHAPE.num_query_heads * SHAPE.head_dim
    graphs = CudaGraphs(cache, step, 16, columns)
    for _ in range(steps - 1):
        decode(plain, wanted)
        plan = cache.plan_decode([stream.sequence for stream in streams])
        out = graphs.run(plan, list(range(len(streams))), [-1] * len(streams))
        cache.end_decode(plan)
        theirs = torch.cat([stream.outputs[-1] for stream in wanted]).float().flatten(1)
        error = (out.float() - theirs).norm(dim=1) / theirs.norm(dim=1)
        assert error.max() < 0.05, error
    torch.cuda.synchronize()
    counts, buffer = cache.fetches, cache.groups[0].store.buffer
    assert counts.selected > counts.fetched > buffer.owner.numel() > 0
    assert not buffer.step[:, cache.groups[0].pool.tables.padding_segment_slot].any()
