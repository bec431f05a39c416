"""Text that cannot fit is refused after a part of it, text that can never; long texts take turns."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from fake_engine import FakeEngine, FakeTokenizer
from test_serve_errors import error_of

from shadowkv.models.tokenization.tokenizer_files import byte_tokenizer
from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.text import tokenization
from shadowkv.serve.text.tokenization import FIRST_PART, LONG, TURNS, encode, in_turn


class CountingTokenizer(FakeTokenizer):
    """Says how many characters it was given."""

    seen = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.seen += len(text)
        return super().encode(text, add_special_tokens)


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.tokenizer = CountingTokenizer()
    return engine


def test_of_a_text_that_cannot_fit_a_part_is_tokenised(post, call, engine, monkeypatch):
    monkeypatch.setattr(tokenization, "TOKENIZE_TOKENS", 300)
    text = "word " * 10**6
    messages = [{"role": "user", "content": text}]
    for ask, limit in (
        (lambda: post("completions", prompt=text), 200),
        (lambda: post("completions", prompt=["a", text]), 200),
        (lambda: post("chat", messages=messages), 200),
        (lambda: call("POST", "/tokenize", json={"messages": messages}), 300),
    ):
        error = error_of(ask())
        assert error["code"] == "context_length_exceeded" and error["param"] in ("prompt", "messages")
        assert f"at most {limit} tokens" in error["message"]
        assert engine.tokenizer.seen <= FIRST_PART * limit + 1
        engine.tokenizer.seen = 0
    error = error_of(post("completions", prompt=[97] * 10**6))
    assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"


def test_too_many_sequences_are_refused_before_any_is_tokenised(post, engine):
    assert "queues 200" in error_of(post("completions", prompt=["a"] * 101, n=2))["message"]
    assert not engine.tokenizer.seen


TEXTS = {
    "words": "The lighthouse stood on the rock. " * 300,
    "one word": "a" * 20_000,
    "spaces": " " * 20_000,
    "lines": "\n" * 20_000,
    "rule": "=" * 20_000,
    "long words": "internationalization " * 1_000,
    "code": "    return self.value\n" * 500,
    "Chinese": "中文字符和" * 2_000,
    "emoji": "🎉" * 2_000,
    "composed": "e\u0301" * 5_000,
}


@pytest.mark.parametrize("name", TEXTS)
def test_what_fits_exactly_is_never_refused(tokenizer, name):
    for one in (tokenizer, byte_tokenizer(300, [256])):
        ids = one.encode(TEXTS[name])
        assert encode(one, TEXTS[name], len(ids), "prompt") == ids


def test_text_of_few_tokens_is_looked_at_in_longer_and_longer_parts(tokenizer):
    text = " " * 2**18
    count = len(tokenizer.encode(text))
    assert len(text) > 2 * FIRST_PART * count  # the first part does not tell
    assert len(encode(tokenizer, text, count, "prompt")) == count
    with pytest.raises(ApiError, match=f"at most {count // 4} tokens"):
        encode(tokenizer, text, count // 4, "prompt")


def test_few_long_texts_at_a_time_and_short_ones_beside_them():
    running, most, go, lock = 0, 0, threading.Event(), threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        assert go.wait(300)
        time.sleep(0.01)
        with lock:
            running -= 1

    async def run() -> None:
        tasks = [asyncio.create_task(in_turn("abc"[number % TURNS], LONG + 1, work)) for number in range(20)]
        while running < TURNS:  # all that may are at work, and stay so
            await asyncio.sleep(0.01)
        assert await in_turn("a", LONG, lambda: "at once") == "at once"
        go.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert most == TURNS
