"""What formats preserve of the keys and values of a text: the squared error of rows as attention reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shadowkv.eval.caches import open_cache, prefill_all
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.sequence import CachedSequence
from shadowkv.kvcache.spec import PAGE, KVSpec
from shadowkv.models.loader import LoadedModel


def distortions(
    loaded: LoadedModel, specs: Sequence[KVSpec], prompts: Sequence[Sequence[int]]
) -> list[tuple[float, float]]:
    """D of keys and of values for each policy: ||x - x'||^2 / ||x||^2, the mean over all rows that are sealed.

    A row is a kv head's key after RoPE, or its value, of one token in one layer, as exact prefill made it; x' is what
    decode attends to in its place. Sink, outliers and the exact tail are not such rows. 0 if nothing is sealed.

    Args:
        prompts: token ids, computed once for all policies.
    """
    totals = torch.zeros(len(specs), 2, dtype=torch.float64)
    counts = [0] * len(specs)
    for prompt in prompts:
        capacity = len(prompt) + 1  # room for the step whose batch says where everything is
        caches = [open_cache(loaded, spec, capacity) for spec in (KVSpec(), *specs)]
        (full, *others), _ = prefill_all(loaded.model, caches, list(prompt), capacity)
        for number, (cache, sequence) in enumerate(zip(caches[1:], others, strict=True)):
            for errors in _errors(caches[0], full, cache, sequence):
                totals[number] += errors.sum(1).cpu()
                counts[number] += errors.shape[1]
    return [
        (float(keys) / max(1, count), float(values) / max(1, count))
        for (keys, values), count in zip(totals, counts, strict=True)
    ]


def _errors(full: KVCache, exact: CachedSequence, cache: KVCache, sequence: CachedSequence) -> Iterator[Tensor]:
    """Relative squared errors of each layer's sealed rows, float64 [2, n]: of keys and of values."""
    dense = full.decode_batch(full.plan_decode([exact]))
    batch = cache.decode_batch(cache.plan_decode([sequence])).sealed
    if batch is None:
        return
    tokens = batch.pages.shape[1] * PAGE
    for layer in range(cache.shape.num_layers):
        exact_rows = full.exact_keys(layer, dense.pages[0]), full.exact_values(layer, dense.pages[0])
        stored = ~cache.exact_elsewhere(layer, batch)[0].repeat_interleave(cache.spec.chunk, dim=1)[:, :tokens]
        errors = []
        for row, found in zip(exact_rows, cache.sealed_rows(layer, batch), strict=True):
            wanted = row[:, :tokens].double()
            norm = wanted.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)  # a row of zeros loses nothing
            errors.append(((wanted - found.double()).square().sum(-1) / norm)[stored])
        yield torch.stack(errors)
