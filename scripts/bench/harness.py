"""Caches and engines for benchmarks, filled by the same calls as models and engines make."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

from shadowkv.engine.engine import Engine
from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.memory.arenas import Blocks, OutOfBlocks
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import FETCH_BUFFER, PAGE, KVSpec
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.ops.apply_rope.tables import RopeConfig

EXTENSIONS = 5000
"""Approximate number of extensions of all sequences in a round of ``scatter``."""

ROUNDS = 2

FEWEST_SEQUENCES = 4
"""Sequences that a benchmark's cache has room for: pages are mixed by growing them in turns."""


def open_cache(
    spec: KVSpec,
    shape: ModelShape,
    rope: RopeConfig,
    sequences: int,
    tokens: int,
    capacity: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    backends: Mapping[str, str] | None = None,
    fetch_buffer: float = FETCH_BUFFER,
) -> KVCache:
    """A cache with scattered room for ``sequences`` with prompts of ``tokens`` that may grow to ``capacity`` each."""
    slots = max(sequences, FEWEST_SEQUENCES)
    layout = Layout(spec, shape, dtype, capacity, fetch_buffer)
    need = layout.demand(tokens, capacity)
    cache = KVCache(
        layout,
        rope,
        slots=slots,
        memory=Blocks({tier: slots * need[tier] for tier in layout.paged}),
        device=device,
        backends=backends,
    )
    scatter(cache)
    return cache


def scatter(cache: KVCache, seed: int = 0) -> None:
    """Leaves the free blocks of an empty cache fragmented, as after long use: in short runs, in random order.

    The largest possible number of sequences grow in turns, by a few pages at a time, until each is as long as it can be
    or nothing is free, and are released in random order. A single sequence grows all at once.
    """
    rng, count, longest = random.Random(seed), cache.free["sequences"], cache.max_model_len
    most = max(1, 2 * count * longest // (PAGE * EXTENSIONS))
    for _ in range(ROUNDS):
        sequences = [cache.allocate(0, 0) for _ in range(count)]
        growing = list(sequences)
        while growing:
            one = rng.choice(growing)
            capacity = min(one.capacity + PAGE * rng.randint(1, most), longest)
            with suppress(OutOfBlocks):
                cache.extend(one, capacity, capacity)
            if one.capacity != capacity or capacity == longest:
                growing.remove(one)
        rng.shuffle(sequences)
        for one in sequences:
            cache.release(one)


@torch.inference_mode()
def fill_random(cache: KVCache, sequence: CachedSequence, tokens: int) -> None:
    """Gives ``sequence`` ``tokens`` new tokens with random keys and values, the same in every layer."""
    batch = cache.prefill_batch([(sequence, tokens)])
    size = 2, tokens, cache.shape.num_kv_heads, cache.shape.head_dim
    k, v = torch.randn(size, dtype=cache.dtype, device=cache.device)
    for layer in range(cache.shape.num_layers):
        cache.append(layer, k, v, batch.block(0, tokens))
        cache.finish_prefill(layer, batch)
    cache.end_prefill(batch)


@torch.inference_mode()
def prefilled(runner: Runner, sequence: CachedSequence, prompt: list[int]) -> Tensor:
    """Logits [V] of the last token of a prompt."""
    steps = runner.prefill([(sequence, prompt)])
    while True:
        try:
            next(steps)
        except StopIteration as end:
            logits: Tensor = end.value[0]
            return logits[0]


def endless(new: int) -> SamplingParams:
    """Greedy, up to exactly ``new`` tokens."""
    return SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)


def fill_all(runner: Runner, sequences: list[CachedSequence], tokens: int) -> None:
    """``fill_random`` for each, on every rank (``Runner.collective_rpc``)."""
    for sequence in sequences:
        fill_random(runner.cache, sequence, tokens)


def begin(engine: Engine, prompts: list[list[int]], new: int, synthetic: bool) -> None:
    """Makes ``engine`` run a request of ``new`` tokens for every prompt; keys and values are random if ``synthetic``.

    Raises MemoryError if some do not fit.
    """
    there, cache = engine.num_running, engine.cache
    for number, prompt in enumerate(prompts, there):
        request = engine.request(str(number), prompt, endless(new))
        try:
            sequence = cache.allocate(len(prompt), request.capacity)
        except OutOfBlocks as error:
            raise MemoryError(f"only {number} of {there + len(prompts)} sequences fit") from error
        if synthetic:
            engine.runner.collective_rpc(fill_all, [sequence], len(prompt))
            token = prompt[-1]
        else:
            token = int(prefilled(engine.runner, sequence, prompt).argmax())
        engine.resume(request, sequence, token)
