"""Warm-up: what compiles, plans or is captured on first use is used once, so that the first prompt is as fast as the
tenth.

A few requests go through the engine's own steps, and are aborted before they end, so that nothing of them is kept.
Plans of attention, which longer prompts need, come from calls of the op on made-up tokens. A thread has plans of its
own (PyTorch's cuDNN attention), so that this belongs on the one that steps the engine.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing

import torch
from tqdm import tqdm

from shadowkv.engine.devices import current
from shadowkv.engine.engine import Engine
from shadowkv.engine.interrupts import interrupts_deferred
from shadowkv.engine.prefill import BLOCK_TOKENS
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.kvcache.sparse_prefill import SPARSE_FROM
from shadowkv.kvcache.spec import PAGE
from shadowkv.layers.group import RankFailure

logger = logging.getLogger(__name__)

SHORT = 48
"""Tokens of a prompt that stays dense."""


def warm_up(engine: Engine, stopped: Callable[[], bool] = lambda: False) -> None:
    """Compiles and plans what first requests would wait for, where the device is one for which that is done and the
    config does not skip it; ends early once ``stopped``. To be called on the thread that steps: plans are its own."""
    if engine.device.type == "cuda" and not engine.config.skip_warmup:
        use_everything_once(engine, stopped)


def use_everything_once(engine: Engine, stopped: Callable[[], bool] = lambda: False) -> None:
    """Warms ``engine`` up, which has no requests, on any device; leaves its cache empty and nothing counted.

    Ends early once ``stopped``, or on Ctrl-C, with KeyboardInterrupt. What goes wrong is logged, and first requests
    will be slower; an error that leaves the device, or another rank, of no use is raised.
    """
    began, shown = time.monotonic(), sys.stderr.isatty()
    if not shown:
        logger.info("warming up")
    stages, shapes = _stages(engine), _shapes(engine)
    bar = tqdm(total=len(stages) + len(shapes), desc="warm-up", unit="", leave=False, disable=not shown)
    alone = engine.scheduler.prefix_cache.on_the_device_alone()
    try:
        with interrupts_deferred() as interruptible, bar, alone, closing(_pieces(engine, stages, shapes)) as pieces:
            for done in pieces:
                bar.update(done)
                interruptible()
                if stopped():
                    return
    except (torch.AcceleratorError, RankFailure):
        raise
    except Exception as error:
        logger.warning("the warm-up ended early, first requests will be slower: %s", error, exc_info=error)
        return
    finally:
        while engine.scheduler.prefix_cache.evict():
            pass
        engine.scheduler.prefix_cache.counts.forget()
        engine.scheduler.prefix_cache.speeds.forget()  # of compiling
        engine.cache.forget_fetches()
        engine.cache.take_attention_density()
    if not shown:
        logger.info("warmed up in %.1f s", time.monotonic() - began)


def _stages(engine: Engine) -> list[tuple[list[int], int]]:
    """Lengths of prompts that are computed and answered together, and of the answers: one prompt, a pack of two, and
    one of more than two blocks that is long enough to be compressed, if any is, with another that shares its start;
    their answers seal a page."""
    spec, longest = engine.cache.spec, 2 * BLOCK_TOKENS[engine.device.type] + SHORT
    room = engine.max_model_len - PAGE - 2  # of a token more, which is not waited for: requests that end are kept
    if spec.seals and spec.dense_limit + PAGE <= room:
        longest = max(longest, spec.dense_limit + PAGE)
    pack = [SHORT, SHORT // 2][: engine.config.max_num_seqs]
    again = min(longest, room - 2 * PAGE)  # a start of what is computed then, and a few tokens more
    shared = [min(longest, room), again] if engine.config.max_num_seqs > 1 and again > PAGE else [min(longest, room)]
    return [([SHORT], 3), (pack, 3), (shared, PAGE + 1)] if room >= SHORT else []


def _shapes(engine: Engine) -> list[tuple[int, int]]:
    """Numbers of queries and keys that attention plans for."""
    if engine.cache.ops.backends["causal_attention"] != "cuda":
        return []
    from shadowkv.ops.causal_attention.cuda import planned

    longest = engine.max_model_len
    if engine.cache.spec.prefill == "sparse":  # beyond, prompts attend to blocks, which need no plans
        longest = min(longest, SPARSE_FROM + BLOCK_TOKENS[engine.device.type])
    return [*planned(_queries(engine), longest)]


def _queries(engine: Engine) -> torch.Tensor:
    """A block of tokens."""
    cache = engine.cache
    size = BLOCK_TOKENS[engine.device.type], cache.shape.num_query_heads, cache.shape.head_dim
    return torch.zeros(size, dtype=cache.dtype, device=engine.device)


def _pieces(
    engine: Engine, stages: list[tuple[list[int], int]], shapes: list[tuple[int, int]]
) -> Generator[int, None, None]:
    """Does all of it; yields after a step 0 or, if a stage or shape is done with it, 1."""
    for prompts, tokens in stages:
        for _ in _answered(engine, prompts, tokens):
            yield 0
        yield 1
    if not shapes:
        return
    planning = engine.runner.plan_attention(shapes)
    for _ in shapes:
        with current(engine.device):
            next(planning)
        yield 1
    torch.cuda.synchronize(engine.device)


def _answered(engine: Engine, prompts: list[int], tokens: int) -> Iterator[None]:
    """Steps of an engine that answers prompts of these lengths; whatever happens, nothing is left of them."""
    sampled = SamplingParams(max_tokens=tokens + 1, temperature=1.0, top_k=50, top_p=0.9, seed=0, ignore_eos=True)
    left = {f"warm-up-{number}": tokens for number in range(len(prompts))}
    vocab = engine.model_config.vocab_size
    try:
        for name, length in zip(left, prompts, strict=True):
            engine.add_request(name, [token % vocab for token in range(length)], sampled)
        while any(more > 0 for more in left.values()):
            for output in engine.step():
                if output.error is not None:
                    raise RuntimeError(output.error)
                left[output.request_id] -= 1
            yield
    finally:
        for name in left:
            engine.abort(name)
