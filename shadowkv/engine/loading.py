"""Builds what an engine runs on: the model, and a cache sized to the memory there is."""

from __future__ import annotations

import psutil
import torch

from shadowkv.engine.config import EngineConfig
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.layout import Blocks, Layout
from shadowkv.kvcache.parts import build_parts
from shadowkv.models.loader import LoadedModel, load_model

GIB = 2**30
DEFAULT_UTILIZATION = {"cuda": 0.9, "cpu": 0.4}
HOST_SHARE = 0.5
"""Of the host memory that is free, the most that values take without being told."""


def load_engine_parts(config: EngineConfig) -> tuple[LoadedModel, KVCache, list[str]]:
    """Model, cache, and the lines that say what fits.

    Raises ValueError for settings that cannot be, MemoryError where not even one sequence fits.
    """
    spec = config.spec()
    loaded = load_from_config(config)
    device, dtype = _device(config.device), next(loaded.model.parameters()).dtype
    shape = loaded.config.shape
    spec = spec.resolve(shape)
    max_model_len = config.max_model_len or loaded.config.max_position
    layout = Layout(spec, shape, dtype, build_parts(spec, shape, dtype))
    slots = config.max_num_seqs + config.max_cached_seqs
    memory, max_model_len = _size(config, layout, slots, max_model_len, device, loaded.config.hidden_size)
    cache = KVCache(
        spec,
        shape,
        loaded.config.rope,
        slots=slots,
        max_model_len=max_model_len,
        memory=memory,
        dtype=dtype,
        device=device,
    )
    return loaded, cache, _describe(config, loaded, cache)


def load_from_config(config: EngineConfig) -> LoadedModel:
    """The model that ``config`` names, on its device; raises ValueError for settings that cannot be."""
    device = _device(config.device)
    return load_model(
        config.model,
        dtype=_dtype(config.dtype, device),
        device=device,
        load_format=config.load_format,
        adapter=config.adapter,
        rope_theta=config.rope_theta,
        max_model_len=config.max_model_len,
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r} is not auto, cpu, cuda or cuda:N") from error
    if device.type not in DEFAULT_UTILIZATION:
        raise ValueError(f"device={name!r} is not supported; use cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name!r} is not there: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _size(
    config: EngineConfig, layout: Layout, slots: int, max_model_len: int, device: torch.device, hidden: int
) -> tuple[Blocks, int]:
    """Blocks of each tier, no more than all slots can use; and the longest sequence those hold.

    A ``max_model_len`` that was asked for must fit; the model's own is lowered to what does.
    """
    share = config.gpu_memory_utilization or DEFAULT_UTILIZATION[device.type]
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # Prefill at its longest: hidden states twice, and one layer's keys (before and after rotation) and values.
        working = max_model_len * (2 * hidden + 3 * layout.shape.kv_dim) * 2
        device_bytes = int(total * share) - (total - free) - working
    else:
        device_bytes = int(psutil.virtual_memory().available * share)
    device_bytes -= slots * layout.state_bytes
    host_bytes = int(psutil.virtual_memory().available * HOST_SHARE)
    if config.host_memory_gib is not None:
        host_bytes = int(config.host_memory_gib * GIB)
    unit = layout.bytes_per_block()
    have = Blocks(max(0, device_bytes) // unit.device, host_bytes // unit.host if unit.host else 0)
    longest = max_model_len
    while longest and not _demand(layout, longest).within(have):
        longest = longest // 2 if config.max_model_len is None else 0
    if not longest:
        need = _demand(layout, max_model_len)
        raise MemoryError(
            f"one sequence of {max_model_len} tokens needs {need.device * unit.device / GIB:.2f} GiB of device and "
            f"{need.host * unit.host / GIB:.2f} GiB of host memory for its KV cache; there are "
            f"{max(0, device_bytes) / GIB:.2f} and {host_bytes / GIB:.2f}. Lower --max-model-len, --batch or "
            "--max-cached-seqs, or raise --gpu-memory-utilization or --host-memory-gib"
        )
    need = _demand(layout, longest)
    return Blocks(min(have.device, slots * need.device), min(have.host, slots * need.host)), longest


def _demand(layout: Layout, capacity: int) -> Blocks:
    return layout.blocks(layout.pages(1, capacity))


def _describe(config: EngineConfig, loaded: LoadedModel, cache: KVCache) -> list[str]:
    spec, unit, total = cache.spec, cache.layout.bytes_per_block(), cache.pool.total
    limit = cache.pool.max_model_len
    kept = f"{spec.keys} keys, {spec.index} index, {spec.values} values on the {spec.place}"
    numbers = f"chunk {spec.chunk}, {spec.outliers} outliers, dense up to {spec.dense_limit} tokens"
    if spec.rank is not None:
        numbers = f"rank {spec.rank} of {cache.shape.kv_dim}, {numbers}"
    dtype = str(cache.dtype).removeprefix("torch.")
    lines = [
        f"model   {loaded.name}: {loaded.config.num_layers} layers, {dtype} on {cache.device}",
        f"policy  {config.kv if isinstance(config.kv, str) else 'custom'}: {kept}"
        + (f"; {numbers}" if spec.seals else ""),
        f"memory  device {total.device * unit.device / GIB:.2f} GiB, host {total.host * unit.host / GIB:.2f} GiB "
        f"for up to {config.max_num_seqs} sequences at once",
    ]
    for length in sorted({min(limit, 1024), min(limit, 8192), limit}):
        need = cache.pool.demand(length, length)
        fits = [("device", total.device // max(1, need.device))]
        if need.host:
            fits.append(("host", total.host // need.host))
        counts = ", ".join(f"{count} on the {tier}" for tier, count in fits)
        lines.append(f"fits    sequences of {length} tokens: {counts}")
    return lines
