"""A server on a Unix domain socket."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest
from server_processes import server

from shadowkv.serve.start import bind_file


def test_a_server_on_a_unix_socket(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a short path: those of sockets are
    file = Path("s.sock")
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(file))
    with server(tiny_model, "--uds", str(file), "--api-server-count=2") as running:
        assert running.url == "unix:s.sock"
        transport = httpx.HTTPTransport(uds=str(file))
        with httpx.Client(transport=transport, base_url="http://any-host", timeout=300) as client:
            answer = client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 3})
        assert answer.json()["usage"]["completion_tokens"] == 3
        with pytest.raises(ValueError, match=r"cannot listen on --uds s.sock: another server uses it"), bind_file(file):
            pass
        assert file.is_socket()
        running.http.terminate()
        running.http.wait()
        assert not file.exists()


def test_a_file_that_is_no_socket_stays(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text("mine")
    with pytest.raises(ValueError, match=f"cannot listen on --uds {file}: Address already in use"), bind_file(file):
        pass
    assert file.read_text() == "mine"


def test_a_server_that_does_not_answer_yet_keeps_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("s.sock")
    with bind_file(file):  # it loads: nobody can connect
        with pytest.raises(ValueError, match="another server uses it"), bind_file(file):
            pass
        assert file.is_socket()
    assert not file.exists()
    with bind_file(file) as listener:
        assert listener.getsockname() == "s.sock"


def test_a_socket_that_another_program_answers_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("s.sock")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(file))
        other.listen()
        with pytest.raises(ValueError, match="Address already in use"), bind_file(file):
            pass
        assert file.is_socket()
