"""The openai client against a real socket, and clients that hang up."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time

import httpx
import openai
import pytest
from fake_engine import REPLY, FakeEngine

from tests.waiting import wait_until

MESSAGES = [{"role": "user", "content": "Hi"}]


def test_sync(client):
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, logprobs=True, top_logprobs=1)
    assert answer.choices[0].message.content == REPLY
    assert answer.choices[0].logprobs.content[0].top_logprobs[0].token == "H"
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    text = client.completions.create(model="fake", prompt=["a", "b"], extra_body={"top_k": 3})
    assert [choice.text for choice in text.choices] == [REPLY, REPLY]


def test_a_message_can_be_sent_back(client):
    answer = client.chat.completions.create(model="fake", messages=MESSAGES)
    messages = [*MESSAGES, answer.choices[0].message, *MESSAGES]
    assert client.chat.completions.create(model="fake", messages=messages).choices[0].message.content == REPLY


def test_sync_stream(client):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model="fake", messages=MESSAGES, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == REPLY
    assert chunks[-1].usage.completion_tokens == len(REPLY)
    text = client.completions.create(model="fake", prompt="Hi", stream=True)
    assert "".join(chunk.choices[0].text for chunk in text) == REPLY


def test_async(url):
    async def run():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            create = client.chat.completions.create
            answers = await asyncio.gather(*(create(model="fake", messages=MESSAGES) for _ in range(20)))
            stream = await create(model="fake", messages=MESSAGES, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            return {answer.choices[0].message.content for answer in answers} | {text}

    assert asyncio.run(run()) == {REPLY}


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == ("fake", 200)
    assert client.models.retrieve("fake") == model


def test_errors(client):
    with pytest.raises(openai.NotFoundError, match="other"):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=MESSAGES, logit_bias={"1": 200})
    assert (caught.value.param, caught.value.type) == ("logit_bias", "invalid_request_error")
    with pytest.raises(openai.APIError, match="not finite"):
        list(client.completions.create(model="fake", prompt="FAIL", stream=True))


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_aborts(url, engine: FakeEngine, stream):
    body = json.dumps({"prompt": ["HANG", "HANG"], "stream": stream}).encode()
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        connection.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: len(engine.running) == 2)
        time.sleep(0.05)
        assert len(engine.running) == 2
    wait_until(lambda: not engine.running)


def test_closing_a_stream_aborts(client, engine):
    stream = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "HANG"}], stream=True)
    next(stream)
    assert engine.running
    stream.close()
    wait_until(lambda: not engine.running)


def test_health_answers_while_a_prompt_is_tokenised(url, engine, monkeypatch):
    started, go_on = threading.Event(), threading.Event()

    def slow(text, add_special_tokens=True):
        started.set()
        assert go_on.wait(300)
        return [1]

    monkeypatch.setattr(engine.tokenizer, "encode", slow)
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json={"prompt": "Hi"}, timeout=300))
    )
    thread.start()
    assert started.wait(300)
    assert httpx.get(f"{url}/health", timeout=30).status_code == 200
    go_on.set()
    thread.join()
    assert answers[0].status_code == 200
