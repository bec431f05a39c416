"""Sequences copied from cache to cache: policies that differ in their budget alone store the same bytes.

A copy takes a thousandth of the time of finding the low-rank form again.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

import torch
from torch import Tensor

from shadowkv.engine.runner import Runner
from shadowkv.eval.caches import prefill
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.memory import GRANULE, Tier
from shadowkv.kvcache.sequence import Sequence
from shadowkv.kvcache.spec import KVSpec


def prefill_all(runner: Runner, opened: Items[tuple[KVCache, Sequence]], prompt: list[int]) -> Tensor:
    """A prompt in new sequences of several caches, the runner's first: logits [V] of its last token.

    It is computed once, and stored once for those that store it alike.
    """
    (_, first), forks, copies = opened[0], list(opened[:1]), []
    for cache, sequence in opened[1:]:
        source = next((fork for fork in forks if stored_alike(fork[0], cache, len(prompt))), None)
        if source is None:
            forks.append((cache, sequence))
        else:
            copies.append((*source, cache, sequence))
    logits = prefill(runner, [(first, prompt)], [(cache, [sequence]) for cache, sequence in forks[1:]])
    for copy in copies:
        copy_sequence(*copy)
    return logits[0]


def stored_alike(cache: KVCache, other: KVCache, tokens: int) -> bool:
    """Whether a prompt of ``tokens`` has the same form in both, and is compressed there."""
    specs, others = (cache.spec, cache.prefill.spec), (other.spec, other.prefill.spec)
    return (
        all(_form(one) == _form(two) for one, two in zip(specs, others, strict=True))
        and cache.layout.state_fields == other.layout.state_fields
        and cache.spec.seals
        and tokens > max(cache.spec.dense_limit, other.spec.dense_limit)
    )


def _form(spec: KVSpec) -> KVSpec:
    """Without what says how much is selected."""
    return replace(spec, budget=None, mass=None, drawn=0.0)


def copy_sequence(cache: KVCache, sequence: Sequence, other: KVCache, copy: Sequence) -> None:
    """Makes ``copy``, new and with the same capacity in another cache, what the prefilled ``sequence`` is in its own.

    The caches store prompts of that length alike.
    """
    for source, target, kinds in (
        (cache.store.device, other.store.device, ("exact_blocks", "sealed_blocks")),
        (cache.store.host, other.store.host, ("host",)),
    ):
        for kind in kinds:
            if getattr(sequence, kind):
                taken = _blocks(source).index_select(1, _numbers(source, getattr(sequence, kind)))
                _blocks(target).index_copy_(1, _numbers(target, getattr(copy, kind)), taken)
    for name, state in cache.store.state.items():
        other.store.state[name][:, copy.slot] = state[:, sequence.slot]
    other.pool.become_compressed(copy, int(cache.pool.table.sealed[sequence.slot]))
    other.pool.table.length[copy.slot] = cache.pool.table.length[sequence.slot]


def _blocks(tier: Tier) -> Tensor:
    """[num_layers, blocks, words]"""
    return tier.arena.view(torch.int64).unflatten(1, (-1, tier.block_bytes // 8))


def _numbers(tier: Tier, granules: list[int]) -> Tensor:
    return torch.tensor(granules, device=tier.arena.device) * GRANULE // tier.block_bytes
