"""Responses that are kept: what ``previous_response_id`` continues, whose they are, and how many there is room for."""

from __future__ import annotations

import json
import os
import time

import pytest
from fake_engine import REPLY, FakeEngine
from replies import named_events
from test_serve_errors import error_of

from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.storage.store import RecordStore

URL = "/v1/responses"


@pytest.fixture
def engine():
    engine = FakeEngine()
    engine.max_model_len = 10_000
    return engine


@pytest.fixture
def send(engine, client_of):
    return client_of(engine)


def ask(send, text="Hi", key=None, **body):
    return send("POST", URL, key, json={"input": text, "max_output_tokens": len(REPLY), **body})


def test_a_conversation_goes_on(send, engine):
    first = ask(send, "Rome?", instructions="Be brief.").json()
    items = [{"role": "user", "content": [{"type": "input_text", "text": "And Oslo?"}]}]
    second = ask(send, items, previous_response_id=first["id"]).json()
    assert second["previous_response_id"] == first["id"]
    third = ask(send, "Well?", previous_response_id=second["id"])
    assert third.status_code == 200, third.text
    turns = f"<user>Rome?<assistant>{REPLY}<user>And Oslo?<assistant>{REPLY}<user>Well?<assistant>"
    assert engine.prompts[-1] == turns  # instructions are of their own request alone


def test_a_stream_is_kept_before_its_last_event(send, engine):
    events = named_events(ask(send, "Rome?", stream=True))
    assert events[-1]["type"] == "response.completed"
    response = events[-1]["response"]
    assert send("GET", f"{URL}/{response['id']}").json() == response
    assert ask(send, "Well?", previous_response_id=response["id"], stream=True).status_code == 200
    assert engine.prompts[-1].startswith("<user>Rome?<assistant>")


def test_what_is_kept_can_be_read_and_deleted(send):
    response = ask(send, "Rome?").json()
    url = f"{URL}/{response['id']}"
    assert send("GET", url).json() == response
    items = send("GET", f"{url}/input_items").json()
    assert [(item["role"], item["content"]) for item in items["data"]] == [("user", "Rome?")]
    assert send("DELETE", url).json() == {"id": response["id"], "object": "response.deleted", "deleted": True}
    for method in ("GET", "DELETE"):
        assert error_of(send(method, url), 404)["code"] == "response_not_found"
    error = error_of(ask(send, previous_response_id=response["id"]), 404)
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")


def test_what_is_not_to_be_kept_is_not(send, engine, client_of):
    response = ask(send, store=False).json()
    assert response["store"] is False and send("GET", f"{URL}/{response['id']}").status_code == 404
    off = client_of(engine, storage_mib=0)
    assert ask(off).json()["store"] is False
    assert error_of(ask(off, previous_response_id="resp_1"), 400)["code"] == "not_kept"


def test_each_key_has_its_own(engine, client_of):
    send = client_of(engine, api_key=("a", "b"))
    id = ask(send, key="a").json()["id"]
    assert send("GET", f"{URL}/{id}", "a").status_code == 200
    for answer in (send("GET", f"{URL}/{id}", "b"), send("DELETE", f"{URL}/{id}", "b")):
        assert answer.status_code == 404
    assert ask(send, key="b", previous_response_id=id).status_code == 404
    assert send("GET", f"{URL}/{id}").status_code == 401


def test_a_request_id_that_is_sent_again_replaces_nothing(send):
    headers, ids = {"X-Request-Id": "same"}, []
    for text in ("Rome?", "Oslo?"):
        answer = send("POST", URL, json={"input": text}, headers=headers)
        assert answer.headers["X-Request-Id"] == "same"
        ids.append(answer.json()["id"])
    for id, text in zip(ids, ("Rome?", "Oslo?"), strict=True):
        assert send("GET", f"{URL}/{id}/input_items").json()["data"][0]["content"] == text
    answer = send("POST", URL, json={"input": "Hi", "store": False}, headers=headers)
    assert answer.json()["id"] == "resp_same"


def test_a_conversation_whose_beginning_is_gone_says_which_response_it_lacks(send):
    first = ask(send, "Rome?").json()["id"]
    second = ask(send, "Oslo?", previous_response_id=first).json()["id"]
    send("DELETE", f"{URL}/{first}")
    error = error_of(ask(send, previous_response_id=second), 404)
    assert error["message"].startswith(f"response {second!r} cannot be continued: {first!r}, earlier in")
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
    error = error_of(ask(send, previous_response_id=first), 404)
    assert error["message"].startswith(f"there is no response {first!r} of this API key: send the whole")


def test_a_conversation_that_is_too_long_is_refused(engine, client_of):
    send = client_of(engine, max_body_mib=0.002)
    first = ask(send, "x" * 1500).json()["id"]
    error = error_of(ask(send, "y" * 1500, previous_response_id=first), 400)
    assert "2097 bytes" in error["message"] and error["code"] == "context_length_exceeded"


def test_the_oldest_make_room_and_files_do_not(tmp_path):
    store = RecordStore(tmp_path, 40_000)
    for number in range(5):
        store.put("a", "response", f"r{number}", {"text": "x" * 8_000})
        if number == 2:
            store.get("a", "response", "r0")  # used again
    for id in ("r1", "r0"):
        kept = id == "r0"
        if kept:
            assert store.get("a", "response", id).value == {"text": "x" * 8_000}
        else:
            with pytest.raises(ApiError, match="Response with id 'r1' not found"):
                store.get("a", "response", id)
    store.put("b", "response", "r0", {})  # another's are not touched
    store.put("a", "batch", "old", {})  # one that has ended makes room, too
    store.put("a", "batch", "b0", {"text": "y" * 30_000}, is_open=True)
    with pytest.raises(ApiError, match="--storage-mib"):
        store.put("a", "batch", "b1", {"text": "y" * 30_000}, is_open=True)
    assert store.get("a", "batch", "b0") and store.get("b", "response", "r0")


def test_what_makes_room_goes_with_all_that_is_beside_it(tmp_path):
    store = RecordStore(tmp_path, 10_000)
    store.put("a", "batch", "old", {})
    store.work_folder("old").mkdir(parents=True)
    (store.work_folder("old") / "answers.jsonl").write_text("{}")
    store.put("a", "response", "r0", {"text": "x" * 8_000})
    assert not store.work_folder("old").exists()


def test_what_no_record_counts_is_removed_at_the_start(tmp_path):
    store = RecordStore(tmp_path, 100_000)
    with store.new_file() as path:
        path.write_text("kept")
        file = store.file("a", store.add_file("a", path, "a.txt", "user_data").id)
    store.put("a", "batch", "batch_kept", {}, is_open=True)
    left = [tmp_path / "files" / "new-1", file.with_name("file-1"), tmp_path / "batches" / "batch_1" / "answers.jsonl"]
    kept = [file, tmp_path / "batches" / "batch_kept" / "answers.jsonl"]
    for path in (*left, *kept):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    for path in (*left, *kept, *(tmp_path / "batches").iterdir()):
        os.utime(path, (time.time() - 60,) * 2)
    written_now = tmp_path / "files" / "new-2"
    written_now.write_text("")
    os.utime(written_now, (time.time() + 60,) * 2)  # by another process of the server
    RecordStore(tmp_path, 100_000)
    assert not any(path.exists() for path in left) and not left[2].parent.exists()
    assert all(path.exists() for path in (*kept, written_now))


def test_an_answer_without_room_says_that_it_is_not_kept(engine, client_of):
    send = client_of(engine, storage_mib=0.002)
    response = ask(send).json()
    assert response["status"] == "completed" and response["store"] is False


def test_a_folder_outlives_its_server(engine, tmp_path, client_of):
    first = client_of(engine, storage_dir=str(tmp_path / "kept"))
    id = ask(first, "Rome?").json()["id"]
    second = client_of(FakeEngine(), storage_dir=str(tmp_path / "kept"))
    assert second("GET", f"{URL}/{id}").json()["id"] == id
    assert "Rome" not in json.dumps(sorted(path.name for path in tmp_path.rglob("*")))


def test_a_folder_of_its_own_goes_with_the_server(engine, client_of):
    send = client_of(engine)
    response = ask(send).json()
    folder = send.app.state.store.lock.parent
    assert list(folder.iterdir()) and send("GET", f"{URL}/{response['id']}").status_code == 200
    assert oct(folder.stat().st_mode)[-3:] == "700"
    send.close()
    assert not folder.exists()


def test_a_folder_that_cannot_be_used_is_told_before_a_model_is_loaded(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be used"):
        ServerSettings(storage_dir=str(tmp_path / "file")).check_files_and_libraries()
    with pytest.raises(ValueError, match="storage_dir has no meaning"):
        ServerSettings(storage_dir=str(tmp_path), storage_mib=0)
