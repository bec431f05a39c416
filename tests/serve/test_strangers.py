"""What one client must not do to another: pages of other sites, other keys' prompts, other keys' long bodies."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from cached_server import tokens
from fake_engine import FakeEngine
from http_server import http_server
from test_serve_errors import error_of

from shadowkv.serve.app import build_app
from shadowkv.serve.bodies.limits import MAX_CONTAINERS, MAX_ITEMS
from shadowkv.serve.http.settings import LOOPBACK, ServerSettings

Serve = Callable[..., Any]

COMPLETION = {"prompt": "a", "max_tokens": 1}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# -- hosts -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def local(engine: FakeEngine) -> Iterator[str]:
    with http_server(build_app(engine, "fake", ServerSettings().listening())) as url:
        yield url


def test_a_page_whose_name_was_bound_to_this_machine_gets_nothing(local: str) -> None:
    port = local.rsplit(":", 1)[1]
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "[::1", "a@127.0.0.1.evil", ""):
        for path in ("/v1/models", "/health", "/"):
            error = error_of(httpx.get(f"{local}{path}", headers={"Host": host}), 403)
            assert error["code"] == "unknown_host" and "--allowed-hosts" in error["message"]
        answer = httpx.post(f"{local}/v1/completions", json=COMPLETION, headers={"Host": host})
        assert answer.status_code == 403


def test_this_machine_s_own_names_are_served(local: str) -> None:
    for host in ("localhost", "LocalHost:1234", "127.0.0.1:80", "[::1]:8000", "[::1]"):
        answer = httpx.post(f"{local}/v1/completions", json=COMPLETION, headers={"Host": host})
        assert answer.status_code == 200, answer.text


def test_a_request_that_names_no_host_is_served(local: str) -> None:
    """As HTTP/1.0 allows: probes of some load balancers, and no browser."""
    host, port = local.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 30) as connection:
        connection.sendall(b"GET /version HTTP/1.0\r\n\r\n")
        assert connection.recv(2**16).startswith(b"HTTP/1.1 200")


def test_which_servers_check_hosts() -> None:
    assert ServerSettings().listening().allowed_hosts == LOOPBACK
    assert ServerSettings(uds="server.sock").listening().allowed_hosts == ()
    assert ServerSettings(host="0.0.0.0").listening().allowed_hosts == ()
    assert ServerSettings(host="localhost", api_key=("k",)).listening().allowed_hosts == ()
    assert ServerSettings(host="localhost", allowed_hosts=("*",)).listening().allowed_hosts == ("*",)


def test_given_hosts_and_any_host(engine: FakeEngine) -> None:
    for given, status in (("a.example", 403), ("b.example", 200), ("*", 200)):
        with http_server(build_app(engine, "fake", ServerSettings(allowed_hosts=(given,)))) as url:
            assert httpx.get(f"{url}/v1/models", headers={"Host": "B.example:1"}).status_code == status


# -- framing -----------------------------------------------------------------------------------------------------------


def test_content_length_beside_transfer_encoding_ends_the_connection(url: str) -> None:
    body = json.dumps(COMPLETION).encode()
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    both = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 30) as connection:
        connection.sendall(head + both + chunks + b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        received = b""
        while data := connection.recv(2**16):  # until it is closed
            received += data
    assert received.startswith(b"HTTP/1.1 400") and b"RFC 9112" in received and received.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("target, status", [("{url}/version", 200), ("{url}/version?a=b", 200), ("{url}", 200)])
def test_a_target_with_its_host_is_the_path(url: str, target: str, status: int) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 30) as connection:
        line = f"GET {target.format(url=url)} HTTP/1.1\r\nHost: other\r\nConnection: close\r\n\r\n"
        connection.sendall(line.encode())
        assert connection.recv(2**16).startswith(b"HTTP/1.1 %d" % status)


def test_the_host_of_a_target_is_checked_like_the_header(local: str) -> None:
    host, port = local.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 30) as connection:
        connection.sendall(b"GET http://evil.example/version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert connection.recv(2**16).startswith(b"HTTP/1.1 403")


# -- keys --------------------------------------------------------------------------------------------------------------


@contextmanager
def two_keys(serve: Serve, **settings: Any) -> Iterator[tuple[Any, Any, httpx.Client]]:
    """Asks as either key, and what is asked with."""
    with serve(ServerSettings(api_key=("one", "two"), **settings)) as client:

        def asking(key: str) -> Any:
            def post(path: str, **body: Any) -> httpx.Response:
                return client.http.post(path, json=body, headers=bearer(key))

            return post

        yield asking("one"), asking("two"), client.http


def cached(post: Any, seed: int, **body: Any) -> int:
    """Whether anything of a prompt was cached."""
    answer = post("/v1/completions", prompt=tokens(seed), max_tokens=1, **body).json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)


def test_keys_share_no_cached_prompts(serve: Serve) -> None:
    with two_keys(serve) as (one, two, http):
        assert [cached(one, 1), cached(one, 1), cached(two, 1), cached(two, 1)] == [0, 1, 0, 1]
        assert [cached(one, 1, cache_salt="a"), cached(two, 1, cache_salt="a"), cached(one, 1, cache_salt="a")] == [
            *(0, 0, 1)
        ]
        for key in ("one", "two"):
            stats = http.get("/page/stats", headers=bearer(key)).json()
            assert (stats["segments"], stats["segment_count"]) == ([], 0)


def test_a_batch_s_cached_prompts_are_its_key_s(serve: Serve) -> None:
    body = {"prompt": tokens(1), "max_tokens": 1}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body})
    with two_keys(serve) as (one, two, http):
        mine = {"headers": bearer("one")}
        file = http.post("/v1/files", files={"file": ("a.jsonl", line)}, data={"purpose": "batch"}, **mine).json()["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = http.post("/v1/batches", json=asked, **mine).json()["id"]
        for _ in range(600):
            if (status := http.get(f"/v1/batches/{batch}", **mine).json()["status"]) == "completed":
                break
            time.sleep(0.1)
        assert status == "completed" and [cached(two, 1), cached(one, 1)] == [0, 1]


def test_keys_share_cached_prompts_where_asked_to(serve: Serve) -> None:
    with two_keys(serve, cache_salt_by_key=False) as (one, two, _):
        assert [cached(one, 1), cached(two, 1)] == [0, 1]


def test_a_single_key_and_none_share() -> None:
    assert (
        not ServerSettings(api_key=("a",)).keeps_keys_apart and not ServerSettings(api_key=("a", "a")).keeps_keys_apart
    )
    assert not ServerSettings().keeps_keys_apart and ServerSettings(api_key=("a", "b")).keeps_keys_apart


def test_a_save_belongs_to_its_key(serve: Serve) -> None:
    name = "x" * 64
    with two_keys(serve) as (one, two, _):
        assert one("/cache/save", name=name, prompt=tokens(1)).status_code == 200
        error = error_of(two("/cache/restore", name=name), 404)
        assert error["code"] == "unknown_name" and error["message"] == f"nothing is saved as {name!r}"
        assert two("/cache/save", name=name, prompt=tokens(2)).json()["tokens"] == 256
        assert one("/cache/restore", name=name).json() | {"seconds": 0} == one("/cache/restore", name=name).json() | {
            "seconds": 0
        }
        assert [cached(one, 1), cached(two, 2), cached(two, 1)] == [1, 1, 0]


# -- long bodies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [' + b"[]," * MAX_CONTAINERS + b"[]]}",
        b'{"prompt": [' + b"{}," * MAX_CONTAINERS + b"{}]}",
        b'{"prompt": "\\"\\\\", "user": [' + b'"a",' * (MAX_ITEMS + 1) + b"1]}",
    ],
    ids=["arrays", "objects", "strings"],
)
def test_too_many_values_are_refused_before_they_are_made(engine: FakeEngine, body: bytes) -> None:
    with http_server(build_app(engine, "fake")) as url:
        headers = {"Content-Type": "application/json"}
        error = error_of(httpx.post(f"{url}/v1/completions", content=body, headers=headers, timeout=60), 413)
    assert error["code"] == "body_too_large" and "are allowed" in error["message"]


def test_a_text_may_hold_as_many_brackets(engine: FakeEngine) -> None:
    text = '[{"\\' * (MAX_CONTAINERS // 2 + 9) + "," * (MAX_ITEMS + 1)
    with http_server(build_app(engine, "fake")) as url:
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1, "user": text}, timeout=60)
    assert answer.status_code == 200, answer.text
