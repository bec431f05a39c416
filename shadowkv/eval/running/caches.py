"""Caches for evaluations: functions that open caches of the needed size, fill them with prompts, and read diagnostics
from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from shadowkv.engine.execution.forward import pieces
from shadowkv.engine.execution.forward import prefill as steps_of_prefill
from shadowkv.engine.startup.loading import give_ops
from shadowkv.engine.startup.sizing import DEFAULT_UTILIZATION, HOST_SHARE, prefill_bytes, storing_bytes
from shadowkv.kvcache.fan_out import FanOut
from shadowkv.kvcache.inspection import diagnostics
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.memory.free_memory import free_host_bytes
from shadowkv.kvcache.parts import prefill_strategy
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.models.decoder import Decoder
from shadowkv.models.loader import LoadedModel

Cache = TypeVar("Cache", bound=KVCache)


def open_cache(loaded: LoadedModel, spec: KVSpec, capacity: int, slots: int = 1) -> KVCache:
    """Returns a cache for ``slots`` sequences of ``capacity`` tokens each. From then on, the model's layers use the ops
    of this cache."""
    return open_cache_as(KVCache, loaded, spec, capacity, slots)


def open_cache_as(kind: type[Cache], loaded: LoadedModel, spec: KVSpec, capacity: int, slots: int) -> Cache:
    """Does the same as ``open_cache``, but returns a cache of class ``kind``."""
    layout, device = _layout(loaded, spec, capacity), next(loaded.model.parameters()).device
    return kind(
        layout,
        loaded.config.rope,
        slots=slots,
        memory=Blocks({tier: slots * count for tier, count in _blocks(layout).items()}),
        ops=give_ops(loaded, layout, device),
        device=device,
    )


def sequences_that_fit(loaded: LoadedModel, specs: Sequence[KVSpec], capacity: int) -> int:
    """Returns how many sequences of ``capacity`` tokens fit in free memory if each sequence is stored under all
    ``specs``.

    On a CPU the result is 1, because a batch is no faster there. As in the engine, a share of the GPU's memory and of
    the host's memory is left free.
    """
    parameter = next(loaded.model.parameters())
    if parameter.device.type == "cpu":
        return 1
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(parameter.device)
    free -= int(total * (1 - DEFAULT_UTILIZATION["cuda"]))
    layouts = [_layout(loaded, spec, capacity) for spec in specs]
    free -= prefill_bytes(loaded.config, capacity, loaded.model.dtype) + max(map(storing_bytes, layouts))
    device = host = 0
    for layout in layouts:
        size = layout.tier_bytes(_blocks(layout))
        device += sum(size[kind] for kind in ("device", "segment_slots", "states"))
        device += 0 if layout.recurrent is None else layout.recurrent.nbytes(1)
        host += size["host"]
    fitting = free // device
    if host:
        fitting = min(fitting, int(free_host_bytes() * HOST_SHARE) // host)
    return max(1, fitting)


def prefill(model: Decoder, cache: KVCache | FanOut, work: list[tuple[Any, list[int]]], scored: bool = False) -> Tensor:
    """Prefills admitted sequences. Returns logits [n, V] of the last token of each of the n sequences; V is the size of
    the vocabulary. If ``scored``, the last layer's attention and MLP compute all tokens instead of only each sequence's
    last one. On a terminal, a progress bar appears after a second."""
    run, tokens = steps_of_prefill(model, cache, work, scored), sum(len(ids) for _, ids in work)
    each = tokens / pieces(model, tokens, scored)  # progress of one piece, in tokens
    bar = tqdm(desc="reading", total=tokens, unit="token", unit_scale=True, leave=False, disable=None, delay=1)
    with torch.inference_mode(), bar:
        while True:
            try:
                next(run)
            except StopIteration as end:
                logits: Tensor = end.value[0]
                return logits
            bar.update(each)


def prefill_all(
    model: Decoder, caches: Sequence[KVCache], prompt: list[int], capacity: int
) -> tuple[list[CachedSequence], Tensor]:
    """Returns a new sequence with the prompt in every cache, and logits [caches, V] of the prompt's last token.

    The prompt is computed once for all caches with the same prefill attention. Of caches that store the prompt in the
    same form, only one compresses it. The others get a copy, which takes a thousandth of the time of computing the
    low-rank form again.
    """
    alike = [
        next((first for first in range(n) if cache.snapshots.stored_alike(caches[first].snapshots, len(prompt))), n)
        for n, cache in enumerate(caches)
    ]
    opened = {n: caches[n].allocate(len(prompt), capacity) for n in sorted(set(alike))}
    logits = {}
    strategies = [
        (cache.spec.prefill or "dense", prefill_strategy(cache.spec).settings_of(cache.spec)) for cache in caches
    ]
    for strategy in dict.fromkeys(strategies):
        storing = [n for n in opened if strategies[n] == strategy]
        fan_out = FanOut([caches[n] for n in storing])
        logits[strategy] = prefill(model, fan_out, [(tuple(opened[n] for n in storing), prompt)])[0]
    sequences = [
        opened[n] if n == first else cache.snapshots.load(caches[first].snapshots.export(opened[first]), capacity)
        for n, (first, cache) in enumerate(zip(alike, caches, strict=True))
    ]
    return sequences, torch.stack([logits[strategy] for strategy in strategies])


def figures(cache: KVCache, sequence: CachedSequence) -> dict[str, float | int]:
    """Returns the number of tokens that a kv head attended to in the last step, and the minimum of each diagnostic over
    layers."""
    attended: dict[str, float | int] = {"attended_tokens": cache.spec.attended_tokens(sequence.length)}
    least = {f"least_{name}": round(float(x.min()), 4) for name, x in diagnostics(cache, sequence).items()}
    return {**attended, **least}


def _layout(loaded: LoadedModel, spec: KVSpec, capacity: int) -> Layout:
    return Layout(spec, loaded.config.shape, loaded.model.dtype, capacity)


def _blocks(layout: Layout) -> Blocks:
    return layout.most_demand(layout.max_model_len)
