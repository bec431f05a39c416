"""The cache with its CUDA kernels against the same cache with the references; needs a GPU."""

import pytest
import torch
from driver import DEVICE, Stream, decode, prefill

from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.layout import Blocks
from shadowkv.kvcache.presets import PRESETS, preset
from shadowkv.kvcache.shape import ModelShape
from shadowkv.ops import Ops
from shadowkv.ops.registry import NAMES
from shadowkv.ops.rotate.tables import RopeConfig

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")

SHAPE = ModelShape(num_layers=2, num_query_heads=6, num_kv_heads=2, head_dim=64)
LENGTHS = [3000, 900, 200, 1500]
STEPS = 150


def run(kv: str, ops: Ops, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    import driver

    monkeypatch.setattr(driver, "SHAPE", SHAPE)
    # Half of the tokens are selected, so that a near tie that falls the other way changes little.
    spec = preset(kv) if kv == "full" else preset(kv, budget=0.5)
    cache = KVCache(
        spec, SHAPE, RopeConfig(64), slots=8, max_model_len=4096, memory=Blocks(400, 400), dtype=torch.bfloat16,
        device=DEVICE, ops=ops,
    )  # fmt: skip
    for tier in (cache.store.device, cache.store.host):
        tier.shuffle(seed=3)
    streams = [Stream(seed, cache.pool.allocate(n, n + STEPS)) for seed, n in enumerate(LENGTHS)]
    for stream in streams:
        for name in ("q", "k", "v"):
            setattr(stream, name, getattr(stream, name).bfloat16())
        prefill(cache, [(stream, LENGTHS[streams.index(stream)])])
    for _ in range(STEPS - 1):
        decode(cache, streams)
    return [stream.output().float() for stream in streams]


@pytest.mark.parametrize("kv", sorted(PRESETS))
def test_kernels_and_references_agree_through_seals(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    got = run(kv, Ops(DEVICE), monkeypatch)
    wanted = run(kv, Ops(DEVICE, dict.fromkeys(NAMES, "reference")), monkeypatch)
    for ours, theirs, length in zip(got, wanted, LENGTHS, strict=True):
        ours, theirs = ours[length:], theirs[length:]
        assert ours.isfinite().all()
        error = (ours - theirs).flatten(1).norm(dim=1) / theirs.flatten(1).norm(dim=1)
        assert error.max() < 0.05, error
        assert error.mean() < 0.02, error
