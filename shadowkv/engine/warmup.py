"""Warm-up: what compiles or is captured on first use is used once, so that the first prompt is as fast as the tenth.

A few requests go through the engine's own steps. They are aborted before they end, except one that a later turn
continues; what is kept of that is evicted.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Generator
from contextlib import closing

import torch
from tqdm import tqdm

from shadowkv.engine.engine import Engine, interrupts_deferred
from shadowkv.engine.execution.prefill import BLOCK_TOKENS
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.layers.group import RankFailure

logger = logging.getLogger(__name__)

SHORT = 48
"""Tokens of a prompt that stays dense."""

MORE = 8
"""Tokens of a later turn."""


def warm_up(engine: Engine, stopped: Callable[[], bool] = lambda: False) -> None:
    """Compiles what first requests would wait for, if the device needs it and the config does not skip it; ends early
    once ``stopped``. To be called on the thread that steps."""
    if engine.device.type == "cuda" and not engine.config.skip_warmup:
        use_everything_once(engine, stopped)


def use_everything_once(engine: Engine, stopped: Callable[[], bool] = lambda: False) -> None:
    """Warms up ``engine``, which has no requests, on any device; leaves its cache empty and the counts at zero.

    Ends early once ``stopped``, or on Ctrl-C, with KeyboardInterrupt. Failures are logged, and first requests will be
    slower; an error that leaves the device, or another rank, unusable is raised.
    """
    began, shown = time.monotonic(), sys.stderr.isatty()
    if not shown:
        logger.info("warming up")
    stages = _stages(engine)
    bar = tqdm(total=len(stages), desc="warm-up", unit="", leave=False, disable=not shown)
    alone = engine.scheduler.prefix_cache.on_the_device_alone()
    try:
        with interrupts_deferred() as interruptible, bar, alone, closing(_pieces(stages)) as pieces:
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
        engine.scheduler.prefix_cache.speeds.forget()  # they included compiling
        engine.cache.forget_fetches()
        engine.cache.take_attention_density()
    if not shown:
        logger.info("warmed up in %.1f s", time.monotonic() - began)


def _stages(engine: Engine) -> list[Generator[None, None, object]]:
    """Steps of an engine that answers, one after the other: one prompt; a pack of two; one of more than two blocks that
    is long enough to be compressed, if any is, with another that shares its prefix, whose answers seal a page, and a
    later turn after it; and a later turn of a short one."""
    spec, longest = engine.cache.spec, 2 * BLOCK_TOKENS[engine.device.type] + SHORT
    room = engine.max_model_len - (PAGE + 1) - MORE - 2  # for its answer, a later turn and that turn's answer
    if room < SHORT:
        return []
    if spec.seals and spec.dense_limit + PAGE <= room:
        longest = max(longest, spec.dense_limit + PAGE)
    pack = [SHORT, SHORT // 2][: engine.config.max_num_seqs]
    again = min(longest, room - 2 * PAGE)  # a prefix of what is computed then, and a few tokens more
    shared = [min(longest, room), again] if engine.config.max_num_seqs > 1 and again > PAGE else [min(longest, room)]
    of_lengths = (([SHORT], 3), (pack, 3))
    answered = [_answered(engine, [_prompt(engine, n) for n in lengths], tokens) for lengths, tokens in of_lengths]
    return [*answered, _later_turn(engine, shared, PAGE + 1), _later_turn(engine, [SHORT], 2)]


def _prompt(engine: Engine, length: int) -> list[int]:
    return [token % engine.model_config.vocab_size for token in range(length)]


def _pieces(stages: list[Generator[None, None, object]]) -> Generator[int, None, None]:
    """Runs all stages; yields 0 after a step, or 1 if that finished a stage."""
    for stage in stages:
        with closing(stage):  # whatever ends this, requests of the stage are removed before anything is evicted
            for _ in stage:
                yield 0
        yield 1


def _later_turn(engine: Engine, lengths: list[int], tokens: int) -> Generator[None, None, None]:
    """Answers prompts completely, so that all is kept, and then a later turn that continues the first."""
    prompts = [_prompt(engine, length) for length in lengths]
    answers = yield from _answered(engine, prompts, tokens, ends=True)
    yield from _answered(engine, [prompts[0] + answers[0] + prompts[0][:MORE]], 1)


def _answered(
    engine: Engine, prompts: list[list[int]], tokens: int, ends: bool = False
) -> Generator[None, None, list[list[int]]]:
    """Steps of an engine that answers prompts with ``tokens`` tokens each; returns those. Whatever happens, nothing is
    left of the requests, except what is kept of those that end."""
    most = tokens if ends else tokens + 1
    sampled = SamplingParams(max_tokens=most, temperature=1.0, top_k=50, top_p=0.9, seed=0, ignore_eos=True)
    answers: dict[str, list[int]] = {f"warm-up-{number}": [] for number in range(len(prompts))}
    try:
        for name, prompt in zip(answers, prompts, strict=True):
            engine.add_request(name, prompt, sampled)
        while any(len(answer) < tokens for answer in answers.values()):
            for output in engine.step():
                if output.error is not None:
                    raise RuntimeError(output.error)
                answers[output.request_id] += output.token_ids
            yield
    finally:
        for name in answers:
            engine.abort(name)
    return [*answers.values()]
