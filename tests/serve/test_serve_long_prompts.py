"""Prompts of 100K tokens, with a real tokenizer: the server answers others meanwhile."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fake_engine import FakeEngine
from http_server import http_server

from shadowkv.serve.app import build_app

LONG = 100_000
TRIES = 3
"""What else runs on the machine is not to be measured."""


@pytest.fixture(scope="module")
def text(tokenizer):
    """Words in no order: the tokenizer's cache is of little help."""
    words = [tokenizer.decode([token]) for token in range(1000, 9000)]
    return " ".join(random.Random(0).choice(words) for _ in range(LONG * 54 // 100))


def health_waits(url, post):
    """Whether a /health waits for ``post`` for most of its time, and the response to that.

    A part of that time and no number of seconds: as good on a machine that is slower by any factor.
    """
    answers, times = [], []
    begin = time.monotonic()
    thread = threading.Thread(target=lambda: answers.append(post()))
    with httpx.Client() as client:
        client.get(f"{url}/health")
        thread.start()
        while thread.is_alive():
            start = time.monotonic()
            assert client.get(f"{url}/health").status_code == 200
            times.append(time.monotonic() - start)
            time.sleep(0.005)
    took = time.monotonic() - begin
    print(f"slowest /health: {max(times):.3f} s of {took:.3f} s")
    return max(times) > max(0.25, took * 2 / 3), answers[0]


@pytest.mark.parametrize("kind", ["text", "chat", "ids", "echo", "tokenize", "detokenize", "refused"])
def test_health(tokenizer, text, kind):
    engine = FakeEngine()
    engine.tokenizer = tokenizer
    engine.max_model_len = 50 if kind == "refused" else 10**6
    ids = tokenizer.encode(text)
    assert len(ids) >= LONG
    # The fake engine's reply is of characters: any token will do.
    body = {
        "text": {"prompt": text},
        "refused": {"prompt": text},
        "tokenize": {"prompt": text},
        "detokenize": {"tokens": ids * 4},
        "ids": {"prompt": ids},
        "echo": {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 0},
        "chat": {"messages": [{"role": "user", "content": text}]},
    }[kind]
    paths = {"chat": "/v1/chat/completions", "tokenize": "/tokenize", "detokenize": "/detokenize"}
    path = paths.get(kind, "/v1/completions")
    with http_server(build_app(engine, "fake")) as url:
        for _ in range(TRIES):
            waits, answer = health_waits(url, lambda: httpx.post(url + path, json=body, timeout=300))
            if not waits:
                break
    assert answer.status_code == (400 if kind == "refused" else 200), answer.text[:500]
    if kind == "echo":
        assert len(answer.json()["choices"][0]["logprobs"]["tokens"]) == len(ids)
    assert not waits


def test_health_while_twenty_long_prompts_arrive(tokenizer):
    engine = FakeEngine()
    engine.tokenizer, engine.max_model_len = tokenizer, 10**6
    body = json.dumps({"prompt": [random.Random(0).randrange(1000) for _ in range(LONG)]}).encode()
    headers = {"Content-Type": "application/json"}
    with http_server(build_app(engine, "fake")) as url, ThreadPoolExecutor(20) as clients:

        def post(_=None):
            return httpx.post(f"{url}/v1/completions", content=body, headers=headers, timeout=300).status_code

        for _ in range(TRIES):
            waits, codes = health_waits(url, lambda: list(clients.map(post, range(20))))
            if not waits:
                break
    assert codes == [200] * 20
    assert not waits
