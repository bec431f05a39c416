"""Substitutes for long use and for trained weights: fragmented free memory, random keys and values, and made-up
selections of blocks and chunks.

With random weights, queries attend to everything almost equally. So a sparse prefill cannot select blocks in a
realistic way, and hardly a chunk is selected in two successive steps. Selections are therefore computed as usual, then
replaced by made-up ones. Times include the cost of selecting.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor

from shadowkv.engine.engine import Engine
from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.arenas import OutOfBlocks
from shadowkv.kvcache.memory.compressed import CompressedBatch
from shadowkv.kvcache.parts.base import BlockHook, Selection
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.ops.select_blocks.reference import LOCAL_BLOCKS, SINK_BLOCKS, Blocks

EXTENSIONS, ROUNDS = 5000, 2
"""Approximate number of extensions of all sequences in a round of ``scatter``, and number of rounds."""

SCRIPT_STEPS = 64
"""Number of steps of a script. After the last step, the script begins again. By then the buffer has evicted most chunks
of the first step."""

# -- sequences ---------------------------------------------------------------------------------------------------------


def scatter(cache: KVCache, seed: int = 0) -> None:
    """Fragments the free blocks of an empty cache, as after long use: short pieces of consecutive blocks are in random
    order.

    The largest possible number of sequences grow by a few pages at a time, in random turns, until each is as long as
    possible or no memory is free. Then they are released in random order. If there is only one sequence, it grows all
    at once.
    """
    rng, count, longest = random.Random(seed), cache.free["sequences"], cache.max_model_len
    most_pages = max(1, 2 * count * longest // (PAGE * EXTENSIONS))
    for _ in range(ROUNDS):
        sequences = [cache.allocate(0, 0) for _ in range(count)]
        growing = list(sequences)
        while growing:
            sequence = rng.choice(growing)
            capacity = min(sequence.capacity + PAGE * rng.randint(1, most_pages), longest)
            with suppress(OutOfBlocks):
                cache.extend(sequence, capacity, capacity)
            if sequence.capacity != capacity or capacity == longest:
                growing.remove(sequence)
        rng.shuffle(sequences)
        for sequence in sequences:
            cache.release(sequence)


@torch.inference_mode()
def fill_random(cache: KVCache, sequence: CachedSequence, tokens: int) -> None:
    """Appends ``tokens`` tokens with random keys and values to ``sequence``. All layers with the same shape of heads
    get the same ones.

    States of recurrent layers keep their initial values, because the time of a step does not depend on them.
    """
    batch = cache.prefill_batch([(sequence, tokens)])
    drawn = {}
    for layer in range(cache.shape.num_layers):
        if cache.shape.kinds and cache.shape.kinds[layer].state:
            continue
        _, kv_heads, dim = heads = cache.place(layer)[0].layout.shape.heads
        if heads not in drawn:
            drawn[heads] = torch.randn(2, tokens, kv_heads, dim, dtype=cache.dtype, device=cache.device)
        cache.append(layer, *drawn[heads], batch.block(0, tokens))
        cache.finish_prefill(layer, batch)
    cache.end_prefill(batch)


@torch.inference_mode()
def prefilled(runner: Runner, sequence: CachedSequence, prompt: list[int]) -> Tensor:
    """Prefills a prompt. Returns the logits [V] of its last token; V is the size of the vocabulary."""
    steps = runner.prefill([(sequence, prompt)])
    while True:
        try:
            next(steps)
        except StopIteration as end:
            logits: Tensor = end.value[0]
            return logits[0]


def endless(new: int) -> SamplingParams:
    """Returns parameters for a greedy answer of exactly ``new`` tokens."""
    return SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)


def fill_all(runner: Runner, sequences: list[CachedSequence], tokens: int) -> None:
    """Calls ``fill_random`` for each sequence. It runs on every rank (``Runner.collective_rpc``)."""
    for sequence in sequences:
        fill_random(runner.cache, sequence, tokens)


def begin(engine: Engine, prompts: list[list[int]], new: int, synthetic: bool) -> None:
    """Makes ``engine`` run a request of ``new`` tokens for every prompt. If ``synthetic``, prompts are not computed,
    and their keys and values are random.

    Raises MemoryError if some sequences do not fit.
    """
    running, cache = engine.num_running, engine.cache
    for number, prompt in enumerate(prompts, running):
        request = engine.request(str(number), prompt, endless(new))
        while (sequence := _allocated(cache, len(prompt), request.capacity)) is None:
            if not engine.scheduler.prefix_cache.evict():  # the prefix cache may still hold sequences that have ended
                raise MemoryError(f"only {number} of {running + len(prompts)} sequences fit")
        if synthetic:
            engine.runner.collective_rpc(fill_all, [sequence], len(prompt))
            token = prompt[-1]
        else:
            token = int(prefilled(engine.runner, sequence, prompt).argmax())
        engine.resume(request, sequence, token)


def _allocated(cache: KVCache, tokens: int, capacity: int) -> CachedSequence | None:
    """Returns a sequence for a prompt of ``tokens`` tokens that may grow to ``capacity``. None if there is no room."""
    with suppress(OutOfBlocks):
        return cache.allocate(tokens, capacity)
    return None


# -- selections --------------------------------------------------------------------------------------------------------


def replayed(density: float, seed: int = 0) -> BlockHook:
    """Returns a hook that replaces the selected blocks of tiles. Each head of a tile gets the blocks that tiles always
    attend to, and random others, in total a share ``density`` of the blocks up to the tile. The replaced selection is
    still computed."""
    known: dict[tuple[int, ...], Blocks] = {}

    def hook(layer: int, q: Tensor, k: Tensor, blocks: Blocks) -> Blocks:
        shape = tuple(blocks[0].shape)
        if shape not in known:
            known[shape] = random_blocks(blocks[0], density, seed)
        return known[shape]

    return hook


def replay(runner: Runner, sequences: list[CachedSequence], density: float | None) -> None:
    """From now on, sparse prefills attend to random blocks of ``density``. If ``density`` is None, they select blocks
    themselves. It runs on every rank (``Runner.collective_rpc``)."""
    runner.cache.block_hook = None if density is None else replayed(density)


def random_blocks(like: Tensor, density: float, seed: int) -> Blocks:
    """Returns random lists of blocks to replace ``like`` int32 [H_q, tiles, blocks] (H_q query heads). The last tile of
    ``like`` ends with the last block. Returns indices int32 [H_q, tiles, n], counts [H_q, tiles], and weights [H_q,
    tiles, n], which are 2 for random blocks and 1 for others. n is the largest count.

    Lists are only n long, because lists of all blocks for a prompt of a million tokens would take gigabytes."""
    heads, tiles, blocks = like.shape
    end = blocks - tiles + 1 + torch.arange(tiles)[:, None]
    count = (density * end.double()).round().clamp_min(SINK_BLOCKS + LOCAL_BLOCKS + 1).minimum(end).int()
    longest, generator = int(count.max()), torch.Generator(like.device).manual_seed(seed)
    end, count = end.to(like.device), count.to(like.device)
    place, within = torch.arange(blocks, device=like.device), torch.arange(longest, device=like.device)
    lists = []
    for _ in range(heads):  # one by one, because sorting takes several times the memory of its input
        order = torch.rand(tiles, blocks, generator=generator, device=like.device)
        order.masked_fill_((place < SINK_BLOCKS) | (place >= end - 1 - LOCAL_BLOCKS), 2).masked_fill_(place >= end, -1)
        chosen = order.topk(longest).indices.masked_fill_(within >= count, blocks).sort().values
        lists.append(chosen.masked_fill_(chosen == blocks, 0).int())
    indices, counts = torch.stack(lists), count.squeeze(1).expand(heads, tiles).contiguous()
    always = (indices < SINK_BLOCKS) | (indices >= end - 1 - LOCAL_BLOCKS)
    return indices, counts, torch.where(always, 1.0, 2.0)


def repeating(
    shape: tuple[int, int, int], k: int, share: float, steps: int, device: torch.device | str = "cuda"
) -> Iterator[Tensor]:
    """Yields the selected chunks int64 [rows, heads, k] of each step, for ``shape`` [rows, heads, chunks]. ``share`` of
    the chunks were also selected in the previous step."""
    last = torch.rand(shape, device=device).topk(k).indices
    for _ in range(steps):
        weights = torch.rand(shape, device=device)
        kept = torch.rand(last.shape, device=device).argsort(-1) < round(share * k)
        last = weights.scatter_add_(-1, last, torch.where(kept, 1.0, -1.0)).topk(k).indices
        yield last


class ScriptedSelection:
    """A ``selection_hook`` that replaces selections by a script. It may be captured in a CUDA graph; each replay then
    continues the script.

    Padding rows of a captured batch belong to the last segment, which is unused. Nothing is selected for them. The
    model must have at least two layers.

    Args:
        tokens: tokens of the shortest sequence that decodes.
        share: share of a step's chunks that the previous step selected, too.
    """

    def __init__(self, cache: KVCache, tokens: int, share: float) -> None:
        self._layer = cache.shape.num_layers
        spec, heads = cache.spec, cache.shape.num_kv_heads
        self._rows, chunks = cache.total["segment_slots"] + 1, spec.compressed_pages(tokens) * PAGE // spec.chunk
        k = int(spec.budget_chunks(torch.tensor([tokens]).numpy())[0])
        # Index of the script's row at which the current step begins.
        self._first = torch.zeros(1, dtype=torch.int64, device=cache.device)
        self._script = torch.full((SCRIPT_STEPS, self._rows, heads, 2 * k), -1, device=cache.device)
        for step, chosen in enumerate(repeating((self._rows, heads, chunks), k, share, SCRIPT_STEPS, cache.device)):
            self._script[step, :-1, :, :k] = chosen[:-1].sort().values
        self._script = self._script.flatten(0, 1)

    def __call__(self, layer: int, q: Tensor, batch: CompressedBatch, selected: Selection) -> Selection:
        """Returns the current step's selection. A new step begins when the layer's number is below that of the previous
        call."""
        width = selected.chunks.shape[-1]
        if layer < self._layer:
            self._first.add_(self._rows).remainder_(len(self._script))
        self._layer = layer
        return Selection(self._script[..., :width].index_select(0, self._first + batch.slots))
