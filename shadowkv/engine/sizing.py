"""How much memory a cache gets: what there is, what one sequence needs, and what is left free for prefill."""

from __future__ import annotations

import psutil
import torch

from shadowkv.engine.config import EngineConfig
from shadowkv.kvcache.layout import Blocks, Layout
from shadowkv.kvcache.shape import ModelShape

GIB = 2**30

DEFAULT_UTILIZATION = {"cuda": 0.9, "cpu": 0.4}
"""Of a GPU's memory, weights included; of a machine's free memory."""

HOST_SHARE = 0.5
"""Of the host memory that is free, the most that values take without being told."""


def prefill_bytes(shape: ModelShape, hidden_size: int, context: int, dtype: torch.dtype) -> int:
    """Device bytes that are left free for a prefill at its longest.

    Hidden states twice, and one layer's keys (before and after the rotation) and values.
    """
    return context * (2 * hidden_size + 3 * shape.kv_dim) * dtype.itemsize


def size_cache(
    config: EngineConfig, layout: Layout, slots: int, device: torch.device, hidden: int
) -> tuple[Blocks, int]:
    """Blocks of each tier, no more than all slots can use; and the longest sequence those hold.

    A ``max_model_len`` that was asked for must fit; the model's own is lowered to what does.
    """
    max_model_len = layout.max_model_len
    share = config.gpu_memory_utilization or DEFAULT_UTILIZATION[device.type]
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        working = prefill_bytes(layout.shape, hidden, max_model_len, layout.exact_fields[0].dtype)
        device_bytes = int(total * share) - (total - free) - working
    else:
        device_bytes = int(psutil.virtual_memory().available * share)
    host_bytes = int(psutil.virtual_memory().available * HOST_SHARE)
    if config.host_memory_gib is not None:
        host_bytes = int(config.host_memory_gib * GIB)
    unit = layout.bytes_per_block()

    def left(layout: Layout) -> int:
        """Device bytes for blocks; a slot more than sequences can have fills up batches."""
        return max(0, device_bytes - (slots + 1) * layout.state_bytes)

    def have(layout: Layout) -> Blocks:
        return Blocks(left(layout) // unit.device, host_bytes // unit.host if unit.host else 0)

    longest = max_model_len
    while longest and not _demand(layout, longest).within(have(layout.resized(longest))):
        longest = longest // 2 if config.max_model_len is None else 0
    if not longest:
        need = _demand(layout, max_model_len)
        raise MemoryError(
            f"one sequence of {max_model_len} tokens needs {need.device * unit.device / GIB:.2f} GiB of device and "
            f"{need.host * unit.host / GIB:.2f} GiB of host memory for its KV cache; there are "
            f"{left(layout) / GIB:.2f} and {host_bytes / GIB:.2f}. Lower --max-model-len, --batch or "
            "--max-cached-seqs, or raise --gpu-memory-utilization or --host-memory-gib"
        )
    need = _demand(layout, longest)
    most = have(layout.resized(longest))
    return Blocks(min(most.device, slots * need.device), min(most.host, slots * need.host)), longest


def _demand(layout: Layout, capacity: int) -> Blocks:
    return layout.blocks(layout.pages(1, capacity))
