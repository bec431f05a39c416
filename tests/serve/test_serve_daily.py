"""What operators ask for: pages of other origins, TLS, shares of keys, request ids, a line for each request, traces."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pytest
from app_client import answers
from fake_engine import REPLY, FakeEngine
from http_server import http_server

from shadowkv.serve.app import build_app
from shadowkv.serve.http.metrics import ConnectionMetrics
from shadowkv.serve.http.middleware import RequestLog
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.settings import add_flags
from tests.waiting import wait_until

ASK = "/v1/completions"
HI = {"json": {"prompt": "Hi"}}
CUT, SEND = "shadowkv:connections_cut_total", {"reason": "send_timeout"}
ORIGIN = {"Origin": "https://a.example"}
PREFLIGHT = {"headers": {**ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}}


def settings_of(*flags: str) -> ServerSettings:
    parser = argparse.ArgumentParser()
    add_flags(parser, ServerSettings)
    return ServerSettings.from_args(parser.parse_args(flags))


def test_pages_of_other_origins(engine):
    (none,) = answers(engine, ServerSettings(), ("POST", ASK, {**HI, "headers": ORIGIN}))
    assert none.status_code == 200 and "access-control-allow-origin" not in none.headers
    # A page asks before it has sent its key, and reads the refusal too.
    settings = ServerSettings(api_key=("k",), allowed_origins=("https://a.example",), allow_credentials=True)
    asked, refused = answers(engine, settings, ("OPTIONS", ASK, PREFLIGHT), ("POST", ASK, {**HI, "headers": ORIGIN}))
    assert asked.status_code == 200 and asked.headers["access-control-allow-headers"] == "x-a"
    assert refused.status_code == 401
    for answer in (asked, refused):
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        assert answer.headers["access-control-allow-credentials"] == "true"
    assert "X-Request-Id" in refused.headers["access-control-expose-headers"]
    for other in ({"allowed_origins": ("https://b.example",)}, {"allowed_methods": ("GET",)}, {"allowed_headers": ()}):
        settings = ServerSettings(**{"allowed_origins": ("*",), **other})
        assert answers(engine, settings, ("OPTIONS", ASK, PREFLIGHT))[0].status_code == 400


def test_lists_are_words_or_json(capsys):
    for flags in (
        ["https://a", "https://b"],
        ['["https://a", "https://b"]'],
        ["https://a", "--allowed-origins", "https://b"],
    ):
        assert settings_of("--allowed-origins", *flags).allowed_origins == ("https://a", "https://b")
    for bad in ("[", "[1]"):
        with pytest.raises(SystemExit):
            settings_of("--allowed-origins", bad)
        assert "is not a JSON list of strings" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--max-concurrent-requests-per-key", "2"], "no meaning without api_key"),
        (["--allow-credentials"], "no meaning without allowed_origins"),
        (["--ssl-keyfile", "k"], "no meaning without ssl_certfile"),
        (["--ssl-certfile", "c", "--ssl-cert-reqs", "2"], "needs ssl_ca_certs"),
        (["--otlp-traces-endpoint", "localhost:4317"], "must be a URL"),
    ],
)
def test_flags_that_go_together(flags, words, monkeypatch):
    monkeypatch.delenv("SHADOWKV_API_KEY", raising=False)
    with pytest.raises(ValueError, match=words):
        settings_of(*flags)


def test_a_key_has_its_share(engine):
    settings = ServerSettings(api_key=("a", "b"), max_concurrent_requests_per_key=1)
    with http_server(build_app(engine, "fake", settings)) as url:
        first, second = (openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) for key in "ab")
        stream = first.completions.create(model="fake", prompt="HANG", stream=True)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="1 request with this API key can run at once") as caught:
            first.models.list()
        assert caught.value.code == "rate_limit_exceeded" and int(caught.value.response.headers["retry-after"]) > 0
        assert second.completions.create(model="fake", prompt="Hi").choices[0].text == REPLY
        assert httpx.get(f"{url}/health", timeout=300).status_code == 200
        assert httpx.get(f"{url}/page/stats", headers={"Authorization": "Bearer a"}, timeout=300).status_code == 200
        assert httpx.get(f"{url}/page/stats", timeout=300).status_code == 401
        stream.close()
        wait_until(
            lambda: httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer a"}, timeout=300).status_code == 200
        )


def test_request_ids(engine):
    sane, bad = "trace-1/Root=1-67.A:b", ["a b", "x" * 129, "ünsane".encode("latin-1"), ""]
    requests = [("POST", ASK, {**HI, "headers": {"X-Request-Id": given}}) for given in (sane, *bad)]
    known, *made = answers(engine, None, *requests)
    assert known.headers["x-request-id"] == sane and known.json()["id"] == f"cmpl-{sane}"
    for answer in made:
        assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"
    assert len({answer.headers["x-request-id"] for answer in made}) == len(bad)
    stream, missing = answers(
        engine, None, ("POST", ASK, {"json": {"prompt": "Hi", "stream": True}}), ("GET", "/nowhere", {})
    )
    assert f'"id":"cmpl-{stream.headers["x-request-id"]}"' in stream.text and missing.headers["x-request-id"]


def messages(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_every_request_has_a_line(engine, caplog):
    caplog.set_level(logging.INFO, "shadowkv.serve.request_log")
    named = {"headers": {"X-Request-Id": "me", "Authorization": "Bearer secret"}}
    answers(
        engine,
        None,
        ("POST", f"{ASK}?token=secret", {"json": {"prompt": ["Hi", "Hello"], "n": 2}, **named}),
        ("POST", ASK, {"json": {"prompt": "Hi", "n": 0}, **named}),
        ("GET", "/forged 200 id=me%0aduration", {}),
        ("GET", "/health", {}),
        ("GET", "/page/stats", {}),
        ("POST", ASK, {"json": {"prompt": "BUG"}, **named}),
    )
    first, second, forged, failed, last = messages(caplog)
    told = f"prompt_tokens=9 cached_tokens=4 completion_tokens={4 * len(REPLY)} ttft="
    assert first.startswith(f"127.0.0.1:123 POST {ASK} 200 id=me {told}") and " duration=" in first
    assert second.startswith(f"127.0.0.1:123 POST {ASK} 400 id=me duration=")
    assert forged.split()[1:4] == ["GET", "/forged%20200%20id=me%0aduration", "404"]
    assert failed == "request me failed" and " 500 id=me " in last
    assert not [line for line in messages(caplog) if "secret" in line or "Hi" in line]
    caplog.clear()
    answers(engine, ServerSettings(disable_uvicorn_access_log=True), ("POST", ASK, HI))
    assert not messages(caplog)


def test_a_line_says_that_the_client_was_gone(url, caplog, engine: FakeEngine):
    caplog.set_level(logging.INFO, "shadowkv.serve.request_log")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        stream = client.completions.create(model="fake", prompt="HANG", stream=True)
        next(iter(stream))
        stream.close()
    wait_until(lambda: messages(caplog))
    (line,) = messages(caplog)
    assert "completion_tokens=2" in line and line.endswith(" cut=client_gone")


@pytest.mark.parametrize("prompt, cut", [("FAIL", "generation_failed"), ("DIE", "engine_dead")])
def test_a_line_says_what_ended_a_stream(engine, caplog, prompt, cut):
    caplog.set_level(logging.INFO, "shadowkv.serve.request_log")
    ask = {"json": {"prompt": prompt, "stream": True}}
    (answer,) = answers(engine, None, ("POST", ASK, ask))
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
    assert messages(caplog)[-1].endswith(f" cut={cut}")


@pytest.mark.parametrize(
    "begun, failure, cut",
    [
        (True, asyncio.CancelledError(), "server_stopping"),
        (True, RuntimeError(), "internal_error"),
        (False, RuntimeError(), None),
    ],
)
def test_a_line_says_how_an_answer_failed(caplog, begun, failure, cut):
    caplog.set_level(logging.INFO, "shadowkv.serve.request_log")

    async def app(scope, receive, send):
        if begun:
            await send({"type": "http.response.start", "status": 200})
        raise failure

    async def nothing(message=None):
        return {"type": "http.request"}

    metrics = ConnectionMetrics("fake")
    owner = SimpleNamespace(state=SimpleNamespace(metrics=metrics))
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "app": owner}
    with pytest.raises(type(failure)):
        asyncio.run(RequestLog(app, log=True, tracing=None)(scope, nothing, nothing))
    (line,) = messages(caplog)
    status = 200 if begun else 500
    assert f" {status} id=" in line
    labels = {"model_name": "fake", "status": str(status)}
    assert metrics.registry.get_sample_value("shadowkv:http_requests_total", labels) == 1
    assert line.endswith(f" cut={cut}") if cut else " cut=" not in line


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    """One of our own for 127.0.0.1, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*command, *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


def test_https(engine, certificate):
    cert, key = map(str, certificate)
    settings = ServerSettings(ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs=cert, ssl_cert_reqs=2)
    settings.check_files_and_libraries()
    with http_server(build_app(engine, "fake", settings)) as url:
        url = url.replace("http:", "https:")
        ours = ssl.create_default_context(cafile=cert)
        with pytest.raises(httpx.HTTPError):  # without a certificate of its own
            httpx.get(f"{url}/health", verify=ours)
        ours.load_cert_chain(cert, key)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="k", http_client=httpx.Client(verify=ours))
        chunks = client.completions.create(model="fake", prompt="Hi", stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == REPLY


def test_limits_of_connections_hold_behind_tls(engine, certificate):
    cert, key = map(str, certificate)
    limits = {"client_header_timeout": 5.0, "send_timeout": 0.3}
    engine.reply = "x" * 150
    app = build_app(engine, "fake", ServerSettings(ssl_certfile=cert, ssl_keyfile=key, **limits))
    ours = ssl.create_default_context(cafile=cert)
    with http_server(app) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with ours.wrap_socket(socket.create_connection(address, 300), server_hostname="127.0.0.1") as silent:
            silent.sendall(b"GET /health HT")
            assert silent.recv(4096).startswith(b"HTTP/1.1 408 ")
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.connect(address)
        with ours.wrap_socket(plain, server_hostname="127.0.0.1") as deaf:
            body = json.dumps({"prompt": ["Hi"] * 90, "max_tokens": 150, "logprobs": 5, "stream": True}).encode()
            head = f"POST {ASK} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            deaf.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait_until(lambda: app.state.metrics.registry.get_sample_value(CUT, {"model_name": "fake", **SEND}) == 1)
            wait_until(lambda: not engine.running)


def test_files_of_tls_are_looked_at_first(certificate, tmp_path):
    cert, key = map(str, certificate)
    with pytest.raises(ValueError, match=r"--ssl-keyfile .* is not a file"):
        ServerSettings(ssl_certfile=cert, ssl_keyfile=str(tmp_path)).check_files_and_libraries()
    with pytest.raises(ValueError, match="unencrypted"):
        ServerSettings(ssl_certfile=key, ssl_keyfile=cert).check_files_and_libraries()


def test_traces_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(
        ValueError,
        match=r"needs OpenTelemetry: .* -m pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
    ):
        ServerSettings(otlp_traces_endpoint="http://localhost:4318/v1/traces").check_files_and_libraries()


def test_spans(engine, monkeypatch):
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from shadowkv.serve.http.tracing import Tracing

    exporter = InMemorySpanExporter()
    made = Tracing(exporter)
    monkeypatch.setattr(Tracing, "to", lambda endpoint: made)
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01", "X-Request-Id": "me"}
    settings = ServerSettings(otlp_traces_endpoint="http://localhost:4318/v1/traces")
    answers(engine, settings, ("POST", ASK, {**HI, "headers": headers}), ("GET", "/v1/models", {}))
    made.close()
    (span,) = exporter.get_finished_spans()
    found = json.loads(span.to_json())
    assert (found["name"], found["context"]["trace_id"]) == ("llm_request", f"0x{trace}")
    assert found["attributes"]["gen_ai.request.id"] == "me"
    assert found["attributes"]["gen_ai.usage.completion_tokens"] == len(REPLY)
