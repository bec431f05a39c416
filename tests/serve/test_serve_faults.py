"""Faults of the real engine, a small real model behind the API: who gets which error, and who goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import httpx
import pytest
from http_server import http_server
from replies import events
from test_serve_errors import error_of
from test_serve_long_prompts import TRIES, health_waits

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.engine.structured import grammar_pool
from shadowkv.serve.app import build_app
from shadowkv.serve.http.settings import ServerSettings
from tests.local_engine import LocalEngine
from tests.waiting import wait_until

SECONDS = 300
"""Most that anything takes, on any machine."""
BODY = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    engine = LocalEngine(EngineConfig(max_model_len=512, max_num_seqs=2, max_cached_seqs=0, device="cpu"))
    engine.start()
    yield engine
    engine.shutdown(10)


@pytest.fixture
def url(engine: LocalEngine) -> Iterator[str]:
    with http_server(build_app(engine, "small")) as url:
        yield url


def ask(url: str, **more: object) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={**BODY, **more}, timeout=SECONDS)


def test_when_the_engine_dies_every_client_is_told(url, engine, monkeypatch):
    def die(*_):
        raise SystemError("boom")

    with ThreadPoolExecutor(4) as clients:
        answers = [clients.submit(ask, url, stream=number % 2 == 0) for number in range(4)]
        wait_until(
            lambda: (
                (engine.engine.stats().running, engine.engine.stats().waiting) == (2, 2)
                and engine.engine.scheduler.running
            )
        )
        assert httpx.get(f"{url}/health").status_code == 200
        monkeypatch.setattr(engine.engine.runner, "decode", die)
        for number, answer in enumerate(answers):
            response = answer.result()
            if number % 2 == 0 and response.status_code == 200:
                error = events(response)[-1]["error"]
                assert set(error) == {"message", "type", "param", "code"}
            else:
                error = error_of(response, 503)
            assert "boom" in error["message"] and error["code"] == "engine_dead"
    assert httpx.get(f"{url}/health").status_code == 503
    for stream in (False, True):
        assert error_of(ask(url, stream=stream), 503)["code"] == "engine_dead"


@pytest.mark.parametrize("stream", [False, True])
def test_a_tokenizer_that_fails_ends_its_request_alone(url, engine, monkeypatch, stream):
    wanted = ask(url, max_tokens=20).json()["choices"][0]["text"]
    with ThreadPoolExecutor(2) as clients:
        broken = clients.submit(ask, url, stream=stream)
        wait_until(lambda: engine.engine.scheduler.running)
        (running,) = engine.engine.scheduler.running
        (text,) = engine._answers[running.request.request_id]._texts
        monkeypatch.setattr(text._detokenizer._stream, "push", None)
        other = clients.submit(ask, url, max_tokens=20)
        response = broken.result()
        # a stream whose first token failed has not begun: it is told by its status, as one answer is
        begun = stream and response.status_code == 200
        error = events(response)[-1]["error"] if begun else error_of(response, 500)
        assert error["code"] == "generation_failed" and "TypeError" in error["message"]
        assert other.result().json()["choices"][0]["text"] == wanted
    assert httpx.get(f"{url}/health").status_code == 200
    pool, finished = engine.engine.cache.groups[0].pool, engine.engine.scheduler.prefix_cache
    assert engine.engine.stats().running == 0 and pool.free + finished.blocks() == pool.total


def test_a_schema_that_nothing_follows(url):
    for schema in ({"$ref": "#"}, {"type": "nope"}, {"enum": ["x" * 2**17]}):
        format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        error = error_of(ask(url, response_format=format))
        assert error["param"] == "response_format" and "/project" not in error["message"]


def endless(number: int) -> str:
    """A schema that takes longer to compile than anybody waits."""
    return json.dumps({"type": "string", "pattern": f"(.{{0,3}}a?){{0,{20 + 100 * (number % 2)}}}{number}"})


@pytest.fixture
def compiling(engine, monkeypatch):
    """Six of them."""
    monkeypatch.setattr(grammar_pool, "ATTEMPTS", ((0.1, 6), (1000.0, 2)))
    found = [engine.engine.requests.grammars.compile(endless(number)) for number in range(6)]
    yield found
    assert not any(one.done() for one in found)
    for one in found:
        one.cancel()


def test_a_small_schema_waits_for_no_large_one(engine, compiling):
    asyncio.run(asyncio.wait_for(engine.compile_grammar('{"type": "boolean"}'), SECONDS))


def test_a_grammar_that_is_there_waits_for_no_other(engine, compiling):
    known = '{"maxLength": 3}'

    async def run():
        await asyncio.wait_for(engine.compile_grammar(known), SECONDS)
        params = SamplingParams(max_tokens=4, json_schema=known)

        async def answer():
            return [output async for _, output in engine.generate([engine.request([1, 2, 3], params)])]

        assert (await asyncio.wait_for(answer(), SECONDS))[-1].finish_reason in ("stop", "length")

    asyncio.run(run())


def test_patterns_that_never_compile_delay_nobody_else(url, engine, monkeypatch):
    monkeypatch.setattr(grammar_pool, "ATTEMPTS", ((0.1, 6), (1.0, 2)))

    def formatted(schema):
        format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return ask(url, response_format=format, max_tokens=8, ignore_eos=False)

    patterns = [f"(.{{0,3}}a?){{0,20}}{number}" for number in range(3)]
    with ThreadPoolExecutor(9) as clients:
        answers = [clients.submit(formatted, {"type": "string", "pattern": patterns[n % 3]}) for n in range(9)]
        served = 0
        while not all(answer.done() for answer in answers):
            assert formatted({"type": "integer", "minimum": served}).status_code == 200
            served += 1
        for answer in answers:
            error = error_of(answer.result(), 504)
            assert (error["param"], error["code"]) == ("response_format", "timeout")
            assert "compiling it takes more than 1 second" in error["message"]
    assert served > 3  # one that queued would have had to wait for all of them
    monkeypatch.setattr(grammar_pool, "ATTEMPTS", ((0.1, 6), (1000.0, 2)))  # not compiled again
    error_of(formatted({"type": "string", "pattern": patterns[0]}), 504)


def test_grammars_that_take_forever_to_match_delay_nobody_else():
    engine = LocalEngine(EngineConfig(max_model_len=512, max_num_seqs=8, max_cached_seqs=0, device="cpu"))
    engine.start()
    nested = 'root ::= (((("{}"{{0,1000}}){{0,1000}}){{0,1000}}){{0,1000}}){{0,1000}}'

    def formatted(number):
        rules = {"grammar": nested.format("abcdef"[number])}
        more = {"max_tokens": 200, "ignore_eos": False, "logit_bias": {"2": -100}}  # no end
        return ask(url, structured_outputs=rules, stream=number % 2 == 0, **more)

    with http_server(build_app(engine, "small")) as url, ThreadPoolExecutor(6) as clients:
        answers, served = [clients.submit(formatted, number) for number in range(6)], 0
        while not all(answer.done() for answer in answers):
            assert ask(url, max_tokens=4).status_code == 200
            served += 1
        for answer in answers:
            response = answer.result()
            if response.status_code == 200:  # a stream, with signs of life
                error = json.loads(response.text.rpartition("data: {")[2].partition("\n")[0].join(("{", "")))["error"]
            else:
                error = error_of(response, 504)
            assert error["code"] == "timeout" and "matching the answer takes more than" in error["message"]
    engine.shutdown(10)
    assert served > 6


def test_a_request_waits_for_its_schema_until_its_deadline(engine, monkeypatch):
    monkeypatch.setattr(engine.engine.requests.grammars, "compile", lambda *_: Future())
    with http_server(build_app(engine, "small", ServerSettings(request_timeout=0.5))) as url:
        error = error_of(ask(url, response_format={"type": "json_object"}), 504)
    assert error["code"] == "timeout" and "longer than this server allows" in error["message"]


def test_others_are_served_while_a_large_schema_is_compiled(url):
    word = {"type": "string", "maxLength": 60}
    inner = {"type": "object", "properties": {"a": word, "b": word, "c": word}, "required": ["a", "b", "c"]}
    for attempt in range(TRIES):
        names = [f"p{attempt}_{number}" for number in range(300)]  # others each time, as what is compiled is kept
        schema = {"type": "object", "properties": dict.fromkeys(names, inner), "required": names}
        format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        waits, answer = health_waits(url, partial(ask, url, response_format=format, max_tokens=2, ignore_eos=False))
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"].startswith("{")
        if not waits:
            break
    assert not waits
