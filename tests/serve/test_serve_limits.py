"""The key, the body limit, time limits, signs of life."""

from __future__ import annotations

import argparse
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from app_client import answers
from fake_engine import REPLY, FakeEngine
from http_server import http_server

from shadowkv.serve.app import build_app
from shadowkv.serve.http.settings import KEY_VARIABLE, ServerSettings
from shadowkv.settings import add_flags


def test_key(engine):
    settings = ServerSettings(api_key=("other", "s3cret"))
    body = {"json": {"prompt": "Hi"}}
    right, wrong = ({"headers": {"Authorization": f"Bearer {key}"}, **body} for key in ("s3cret", "s3crets"))
    ask = "/v1/completions"
    requests = [("POST", ask, body), ("POST", ask, wrong), ("GET", "/v1/models", {}), ("POST", "/tokenize", body)]
    for answer in answers(engine, settings, *requests):
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert "s3cret" not in answer.text
    assert not engine.prompts
    no_keys = ["s3cret", "Basic s3cret", "Bearer", "Bearer S3CRET", "Bearers3cret", "Bearer s3cret s3cret", ""]
    requests = [("POST", ask, {"headers": {"Authorization": given}, **body}) for given in no_keys]
    assert [answer.status_code for answer in answers(engine, settings, *requests)] == [401] * len(no_keys)
    # The scheme's case does not matter, the key's does.
    requests = [
        ("POST", ask, {"headers": {"Authorization": f"{scheme} s3cret"}, **body})
        for scheme in ("bearer", "BEARER", "Bearer ")
    ]
    assert [answer.status_code for answer in answers(engine, settings, *requests)] == [200] * 3
    requests = [("POST", ask, right), *(("GET", path, {}) for path in ("/health", "/version", "/metrics"))]
    assert [answer.status_code for answer in answers(engine, settings, *requests)] == [200] * 4
    with http_server(build_app(engine, "fake", settings)) as url:
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0).models.list()
        assert openai.OpenAI(base_url=f"{url}/v1", api_key="s3cret").models.list().data


def test_body_limit_by_its_length_and_while_it_comes_in(engine):
    async def endless():
        for _ in range(40):
            yield b"[" * 1000

    settings = ServerSettings(max_body_mib=1 / 64)
    json_type = {"Content-Type": "application/json"}
    long = [{"content": b'{"prompt": "' + b"x" * 20_000}, {"content": endless()}]
    requests = [("POST", "/v1/completions", {**options, "headers": json_type}) for options in long]
    with http_server(build_app(engine, "fake", settings)) as url:
        over_sockets = [httpx.request(method, url + path, **o) for method, path, o in requests[:1]]
        body = b"".join(b"3e8\r\n" + b"[" * 1000 + b"\r\n" for _ in range(40)) + b"0\r\n\r\n"
        assert b" 413 " in raw(url, b"Transfer-Encoding: chunked\r\n", body)
        # A client that announces more than it sends is not waited for.
        assert b" 413 " in raw(url, b"Content-Length: 9999999999\r\n", b"{}")
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x" * 15}, timeout=300).status_code == 200
    for answer in [*over_sockets, *answers(engine, settings, *requests)]:
        assert answer.status_code == 413 and "0.015625 MiB" in answer.json()["error"]["message"]
    assert len(engine.prompts) == 1


def raw(url, header, body, timeout=300):
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=timeout) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        connection.sendall(head.encode() + header + b"\r\n" + body)
        return connection.recv(4096)


@pytest.mark.parametrize("stream", [False, True])
def test_request_timeout(engine, stream):
    body = {"json": {"prompt": ["HANG", "fine"], "stream": stream}}
    (answer,) = answers(engine, ServerSettings(request_timeout=2.0), ("POST", "/v1/completions", body))
    if stream:
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
        last = json.loads(answer.text.split("\n\n")[-3].removeprefix("data: "))
    else:
        assert answer.status_code == 504
        last = answer.json()
    assert (last["error"]["code"], last["error"]["type"]) == ("timeout", "server_error")
    assert not engine.running


def test_a_silent_stream_shows_that_it_lives(engine: FakeEngine):
    engine.silence, body = 3.0, {"json": {"prompt": "SLEEP", "stream": True}}

    def ask(interval: float) -> None:
        start = time.monotonic()
        (answer,) = answers(engine, ServerSettings(keep_alive_interval=interval), ("POST", "/v1/completions", body))
        took = time.monotonic() - start
        most = took / interval if interval else 0
        assert (interval == 0.1) <= answer.text.count(": keep-alive\n\n") <= most
        assert answer.text.startswith(": keep-alive" if interval == 0.1 else "data: ")

    with ThreadPoolExecutor(3) as threads:  # they only wait
        list(threads.map(ask, (0.1, 0, 60)))
    with http_server(build_app(engine, "fake", ServerSettings(keep_alive_interval=0.05))) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        start = time.monotonic()
        chunks = client.completions.create(model="fake", prompt="SLEEP", stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == REPLY
        assert time.monotonic() - start >= engine.silence


@pytest.mark.parametrize("key", ["", " ", "   ", " key", "key ", "\tkey", "key\n", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_refused(key):
    with pytest.raises(ValueError, match="or with blanks around it"):
        ServerSettings(api_key=("k", key))


def test_a_key_with_blanks_inside(engine):
    request = ("GET", "/v1/models", {"headers": {"Authorization": "Bearer a  key"}})
    assert [answer.status_code for answer in answers(engine, ServerSettings(api_key=("a  key",)), request)] == [200]


def test_settings(monkeypatch):
    with pytest.raises(
        ValueError, match=r"max_body_mib=0.*request_timeout=-1.0.*send_timeout=nan.*limit_concurrency=0.*api_key"
    ):
        ServerSettings(
            api_key=("",), max_body_mib=0, request_timeout=-1.0, send_timeout=float("nan"), limit_concurrency=0
        )
    parser = argparse.ArgumentParser()
    add_flags(parser, ServerSettings)
    monkeypatch.setenv(KEY_VARIABLE, "from outside\nand another")
    assert ServerSettings.from_args(parser.parse_args([])) == ServerSettings(api_key=("from outside", "and another"))
    asked = parser.parse_args(
        ["--api-key", "k", "l", "--max-body-mib", "2", "--api-key", "m", "--shutdown-timeout", "0"]
        + ["--allowed-methods", "GET", "--allowed-methods", "PUT", "--no-ui", "--no-cache-salt-by-key"]
    )
    assert ServerSettings.from_args(asked) == ServerSettings(
        api_key=("k", "l", "m"),
        max_body_mib=2,
        shutdown_timeout=0,
        allowed_methods=("GET", "PUT"),
        ui=False,
        cache_salt_by_key=False,
    )
