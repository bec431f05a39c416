"""Measures prompts that a vLLM engine computed before. The figures are defined as in
``benchmarks.prefix_cache.reuse``."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

from benchmarks.peer.peer_drive import LARGEST_ID, Driver
from benchmarks.prefix_cache.chat_trace import ChatTrace, TraceShape

HITS = 5
"""Number of measured requests in cases whose requests come one after the other."""

ON_DEVICE, DOCUMENTS = 2, 4
"""For ``restored``: number of documents that the device has room for, and number of documents that are requested in
turn. Between two requests for one document come all others. They do not fit on the device together, so each document is
evicted before it is requested again."""


class Shape(NamedTuple):
    """Number of requests for one document, tokens of the document, tokens of each question (``own``) and answer, and a
    trace of chats."""

    requests: int = 48
    document: int = 61440
    own: int = 512
    answer: int = 128
    trace: TraceShape = TraceShape()


def questions(driver: Driver, shape: Shape, count: int) -> list[list[int]]:
    """Returns ``count`` prompts that begin with the same new document, each with another question."""
    document = driver.draw(shape.document)
    return [document + driver.draw(shape.own) for _ in range(count)]


def shared(driver: Driver, shape: Shape) -> dict[str, Any]:
    """Returns the columns for concurrent requests for one document, after two warm-up requests for another document."""
    driver.offer(questions(driver, shape, 2), [min(8, shape.answer)] * 2)
    return figures(driver, [questions(driver, shape, shape.requests)], shape.answer)


def one_by_one(driver: Driver, shape: Shape) -> dict[str, Any]:
    """Returns the columns for requests whose document an earlier request has computed."""
    first, *others = questions(driver, shape, 1 + HITS)
    driver.offer([first], [shape.answer])
    return figures(driver, [[one] for one in others], shape.answer)


def restored(driver: Driver, shape: Shape) -> dict[str, Any]:
    """Returns the columns for documents that come back after others evicted them from the device, each with an answer
    of one token."""
    documents = [driver.draw(shape.document) for _ in range(DOCUMENTS)]
    for one in [*documents, documents[0]]:  # the first restore does not count
        driver.offer([one], [1])
    return figures(driver, [[documents[number % DOCUMENTS]] for number in range(1, 1 + HITS)], 1)


def trace(driver: Driver, shape: Shape) -> dict[str, Any]:
    """Returns the columns for chats over documents."""
    chats = ChatTrace(shape.trace, lambda tokens, draw: draw.choices(range(100, LARGEST_ID), k=tokens))
    before, offered = sources(driver.engine), dict[str, tuple[int, float]]()
    left, firsts, prompts = dict[str, int](), list[float](), 0
    start = time.perf_counter()
    while True:
        for chat, prompt in chats.due():
            name = f"{chat} {len(prompt)}"
            offered[name], left[name], prompts = (chat, time.perf_counter()), shape.answer, prompts + len(prompt)
            driver.engine.add_request(name, {"prompt_token_ids": prompt}, driver.sampling(shape.answer))
        if not left:
            break
        done = driver.engine.step()
        now = time.perf_counter()
        for one in done:
            (chat, at), tokens = offered[one.request_id], list(one.outputs[0].token_ids)
            if left[one.request_id] == shape.answer and tokens:
                firsts.append(now - at)
            left[one.request_id] -= len(tokens)
            chats.came(chat, tokens, not left[one.request_id])
            if not left[one.request_id]:
                del left[one.request_id]
    return columns(driver, firsts, time.perf_counter() - start, prompts, shape.answer, before)


def figures(driver: Driver, groups: list[list[list[int]]], output: int) -> dict[str, Any]:
    """Runs groups of prompts, one group after the other. Returns the columns; ``wall_s`` is the sum of the groups'
    times."""
    before, wall = sources(driver.engine), 0.0
    firsts: list[float] = []
    for prompts in groups:
        start, came = driver.offer(prompts, [output] * len(prompts))
        firsts += [one[0] - start for one in came]
        wall += max(one[-1] for one in came) - start
    return columns(driver, firsts, wall, sum(len(prompt) for prompts in groups for prompt in prompts), output, before)


def columns(
    driver: Driver, firsts: list[float], wall: float, tokens: int, output: int, before: dict[str, int]
) -> dict[str, Any]:
    """Returns the columns of a row. Hit rates are shares of ``tokens``, the number of tokens of all prompts."""
    found = {name: count - before[name] for name, count in sources(driver.engine).items()}
    if sum(found.values()) != tokens:
        raise RuntimeError(f"vLLM counts {found}, of prompts of {tokens} tokens")
    p50, p99 = np.percentile(firsts, (50, 99)).tolist()
    return {
        "wall_s": wall,
        "ttft_p50_s": p50,
        "ttft_p99_s": p99,
        "output_tokens_per_s": len(firsts) * output / wall,
        "hit_rate_device": found["local_cache_hit"] / tokens,
        "hit_rate_host": found["external_kv_transfer"] / tokens,
    }


def sources(engine: Any) -> dict[str, int]:
    """Returns the number of prompt tokens so far by their source (computed, or a tier). vLLM counts them when an answer
    has its first token."""
    metrics = engine.get_metrics()
    return {one.labels["source"]: one.value for one in metrics if one.name == "vllm:prompt_tokens_by_source"}
