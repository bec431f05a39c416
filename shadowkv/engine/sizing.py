"""How much memory a cache gets: what there is, what one sequence needs, and what is left free for prefill."""

from __future__ import annotations

import psutil
import torch

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.runner import BLOCK_TOKENS
from shadowkv.kvcache.layout import Blocks, Layout
from shadowkv.models.config import ModelConfig
from shadowkv.ops.low_rank_basis.cuda import ROWS_AT_ONCE

GIB = 2**30

DEFAULT_UTILIZATION = {"cuda": 0.9, "cpu": 0.4}
"""Of a GPU's memory, weights included; of a machine's free memory."""

HOST_SHARE = 0.5
"""Of the host memory that is free, the most that values take without being told."""

GRAM_BYTES = 64
"""For each entry of the Gram matrix of all kv heads' keys: several copies of it in float64, and as much to work in."""


def prefill_bytes(model: ModelConfig, context: int, dtype: torch.dtype) -> int:
    """Device bytes that are left free for a prefill at its longest.

    Its hidden states, and one layer's keys (before and after the rotation) and values; the largest tensors of a block
    of tokens that are there together, which is in the MLP; and what storing the layer takes meanwhile.
    """
    kv_dim, block = model.shape.kv_dim, min(context, BLOCK_TOKENS["cuda"])
    whole = context * (model.hidden_size + 3 * kv_dim)
    in_the_mlp = block * 3 * (model.hidden_size + model.intermediate_size)
    storing = 2 * min(context, ROWS_AT_ONCE) * kv_dim
    return (whole + in_the_mlp + storing) * dtype.itemsize + GRAM_BYTES * kv_dim**2


def size_cache(
    config: EngineConfig, layout: Layout, slots: int, device: torch.device, model: ModelConfig
) -> tuple[Blocks, int]:
    """Blocks of each tier, no more than all slots can use; and the longest sequence those hold.

    A ``max_model_len`` that was asked for must fit; the model's own is lowered to what does. Raises MemoryError where
    not one sequence fits, or where more host memory was asked for than is free.
    """
    max_model_len = layout.max_model_len
    share = config.gpu_memory_utilization or DEFAULT_UTILIZATION[device.type]
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        working = prefill_bytes(model, max_model_len, layout.exact_fields[0].dtype)
        device_bytes = int(total * share) - (total - free) - working
    else:
        device_bytes = int(psutil.virtual_memory().available * share)
    host_free = psutil.virtual_memory().available
    host_bytes = int(host_free * HOST_SHARE)
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
    blocks = Blocks(min(most.device, slots * need.device), min(most.host, slots * need.host))
    taken = blocks.host * unit.host
    if taken > host_free:  # it would be given, and the process killed later
        raise MemoryError(
            f"the KV cache would take {taken / GIB:.2f} GiB of host memory, {host_free / GIB:.2f} are free. Lower "
            "--host-memory-gib"
        )
    return blocks, longest


def _demand(layout: Layout, capacity: int) -> Blocks:
    return layout.blocks(layout.pages(1, capacity))
