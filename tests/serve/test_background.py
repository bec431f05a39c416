"""Responses in the background: begun, read while they are made, cancelled, lost; and what is kept of each."""

from __future__ import annotations

import httpx
import openai
import pytest
from fake_engine import REPLY, FakeEngine
from http_server import http_server
from test_serve_errors import error_of

from shadowkv.serve.app import build_app
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.responses import background
from shadowkv.serve.responses.answers import Response
from tests.waiting import wait_until

URL = "/v1/responses"


@pytest.fixture
def client(url):
    with httpx.Client(base_url=url) as client:
        yield client


def begin(client, text="Hi", **body):
    answer = client.post(URL, json={"input": text, "background": True, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def ended(client, id, **options):
    """The response when it is no longer at work."""

    def response():
        return client.get(f"{URL}/{id}", **options).json()

    wait_until(lambda: response()["status"] not in background.UNFINISHED)
    Response.model_validate(response())
    return response()


def test_an_answer_is_read_when_it_is_there(client, engine):
    queued = begin(client, "Rome?")
    Response.model_validate(queued)
    assert queued["id"].startswith("resp_") and (queued["status"], queued["output"]) == ("queued", [])
    answer = ended(client, queued["id"])
    assert (answer["status"], answer["background"], answer["store"]) == ("completed", True, True)
    assert answer["output"][0]["content"][0]["text"] == REPLY and answer["usage"]["output_tokens"] == len(REPLY)
    items = client.get(f"{URL}/{answer['id']}/input_items").json()["data"]
    assert [item["content"] for item in items] == ["Rome?"]
    client.post(URL, json={"input": "Oslo?", "previous_response_id": answer["id"]})
    assert engine.prompts[-1] == f"<user>Rome?<assistant>{REPLY}<user>Oslo?<assistant>"


def test_one_at_work_says_so_and_can_be_cancelled(client, engine):
    id = begin(client, "HANG")["id"]
    wait_until(lambda: client.get(f"{URL}/{id}").json()["status"] == "in_progress")
    error = error_of(client.post(URL, json={"input": "Go on", "previous_response_id": id}), 400)
    assert error["param"] == "previous_response_id" and "in_progress" in error["message"]
    for _ in range(2):  # the second time there is nothing left to do
        cancelled = client.post(f"{URL}/{id}/cancel")
        assert cancelled.status_code == 200 and cancelled.json()["status"] == "cancelled"
    wait_until(lambda: not engine.running)
    assert ended(client, id)["status"] == "cancelled"


def test_an_owner_has_a_few_at_work(client, monkeypatch):
    monkeypatch.setattr(background, "MAX_OF_AN_OWNER", 1)
    id = begin(client, "HANG")["id"]
    body = {"input": "Hi", "background": True}
    assert error_of(client.post(URL, json=body), 429)["code"] == "rate_limit_exceeded"
    client.post(f"{URL}/{id}/cancel")
    wait_until(lambda: client.post(URL, json=body).status_code == 200)


def test_what_has_ended_is_not_cancelled(client):
    id = begin(client)["id"]
    answer = ended(client, id)
    assert client.post(f"{URL}/{id}/cancel").json() == answer
    synchronous = client.post(URL, json={"input": "Hi"}).json()
    assert "synchronous" in error_of(client.post(f"{URL}/{synchronous['id']}/cancel"), 400)["message"]
    assert error_of(client.post(f"{URL}/resp_x/cancel"), 404)["code"] == "response_not_found"
    assert error_of(client.get(f"{URL}/{id}?stream=true"), 400)["param"] == "stream"


def test_openais_client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        response = client.responses.create(model="fake", input="HANG", background=True)
        assert response.status == "queued"
        assert client.responses.cancel(response.id).status == "cancelled"


@pytest.mark.parametrize("text", ["FAIL", "BUSY", "DIE"])
def test_a_failure_is_kept(client, text):
    answer = ended(client, begin(client, text)["id"])
    assert answer["status"] == "failed" and answer["error"]["code"] == "server_error" and answer["error"]["message"]


def test_a_wrong_request_is_refused_at_once(client):
    assert error_of(client.post(URL, json={"input": "a" * 300, "background": True}), 400)["param"]


def test_one_that_is_deleted_is_no_longer_worked_at(client, engine, monkeypatch):
    monkeypatch.setattr(background, "BEAT_SECONDS", 0.05)
    id = begin(client, "HANG")["id"]
    wait_until(lambda: engine.running)
    assert client.delete(f"{URL}/{id}").status_code == 200
    wait_until(lambda: not engine.running)
    assert client.get(f"{URL}/{id}").status_code == 404


def test_another_process_can_cancel(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(background, "BEAT_SECONDS", 0.05)
    settings = ServerSettings(storage_dir=str(tmp_path / "kept"))
    first, second = build_app(engine, "fake", settings), build_app(FakeEngine(), "fake", settings)
    with http_server(first) as url, http_server(second) as other:
        with httpx.Client(base_url=url) as client:
            id = begin(client, "HANG")["id"]
        wait_until(lambda: engine.running)
        assert httpx.post(f"{other}{URL}/{id}/cancel").json()["status"] == "cancelled"
        wait_until(lambda: not engine.running)
        assert httpx.get(f"{url}{URL}/{id}").json()["status"] == "cancelled"


def test_a_server_that_stops_says_so_of_what_it_leaves(tmp_path):
    settings = ServerSettings(storage_dir=str(tmp_path / "kept"))
    with http_server(build_app(FakeEngine(), "fake", settings)) as url, httpx.Client(base_url=url) as client:
        id = begin(client, "HANG")["id"]
    with http_server(build_app(FakeEngine(), "fake", settings)) as url:
        answer = httpx.get(f"{url}{URL}/{id}").json()
    assert (answer["status"], answer["error"]["message"]) == ("failed", "the server is stopping")


def test_what_a_killed_server_leaves_has_failed(client, monkeypatch):
    id = begin(client, "HANG")["id"]
    monkeypatch.setattr(background, "LOST_SECONDS", -1e9)  # however lately the process at work has said that it is
    answer = client.get(f"{URL}/{id}").json()
    assert answer["status"] == "failed" and "has ended" in answer["error"]["message"]


def test_an_answer_without_room_has_failed(engine, tmp_path):
    settings = ServerSettings(storage_mib=1)
    engine.reply = "a" * 20_000
    engine.max_model_len = 10**7
    with http_server(build_app(engine, "fake", settings)) as url, httpx.Client(base_url=url) as client:
        file = ("f", b"a" * (2**20 - 12_000))
        assert client.post("/v1/files", data={"purpose": "batch"}, files={"file": file}).status_code == 200
        answer = ended(client, begin(client)["id"])
    assert answer["status"] == "failed" and "--storage-mib" in answer["error"]["message"] and not answer["output"]


def test_a_server_that_keeps_nothing_has_no_background(engine):
    settings = ServerSettings(storage_mib=0)
    with http_server(build_app(engine, "fake", settings)) as url:
        answer = httpx.post(f"{url}{URL}", json={"input": "Hi", "background": True})
    assert error_of(answer, 400)["param"] == "background"
