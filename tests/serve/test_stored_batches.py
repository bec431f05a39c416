"""``/v1/files``, ``/v1/batches`` and ``/v1/messages/batches``, with both APIs' clients: what is answered, cancelled,
kept over a restart, and whose it is."""

from __future__ import annotations

import base64
import errno
import json
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from fake_engine import REPLY, FakeEngine
from http_server import http_server
from page_files import pdf

from shadowkv.serve.app import build_app
from shadowkv.serve.batch.runner import LINE_BYTES
from shadowkv.serve.http.settings import ServerSettings
from tests.waiting import wait_until


def line(name, text="Hi", url="/v1/chat/completions", **body):
    asked = {"messages": [{"role": "user", "content": text}], "max_tokens": len(REPLY), **body}
    return {"custom_id": name, "method": "POST", "url": url, "body": asked}


def jsonl(*lines):
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def message(name, text="Hi", **params):
    """A request of a batch of messages."""
    asked = {"model": "fake", "max_tokens": len(REPLY), "messages": [{"role": "user", "content": text}], **params}
    return {"custom_id": name, "params": asked}


@contextmanager
def serving(engine=None, **settings):
    with http_server(build_app(engine or FakeEngine(), "fake", ServerSettings(**settings))) as url:
        yield url


def openai_client(url, key="none"):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def anthropic_client(url, key="none"):
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)


@contextmanager
def client_of_server(engine=None, **settings):
    """OpenAI's client of a server of its own."""
    with serving(engine, **settings) as url, openai_client(url) as client:
        yield client


def upload(client, content, purpose="batch"):
    return client.files.create(file=("in.jsonl", content), purpose=purpose)


def begin(client, content, endpoint="/v1/chat/completions", **more):
    file = upload(client, content)
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


def ended(batches, batch, *statuses):
    """What comes of a batch of a client's ``batches``; each look takes a moment."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        batch = batches.retrieve(batch.id)
        if getattr(batch, "status", None) in statuses or getattr(batch, "processing_status", None) in statuses:
            return batch
        time.sleep(0.05)
    raise AssertionError(f"still {batch}")


def records(client, id):
    return {record["custom_id"]: record for record in map(json.loads, client.files.content(id).text.splitlines())}


@pytest.fixture
def client(url):
    with openai_client(url) as client:
        yield client


def test_files(client):
    file = upload(client, b"a\n", purpose="user_data")
    assert (file.bytes, file.filename, file.purpose, file.status) == (2, "in.jsonl", "user_data", "processed")
    assert client.files.retrieve(file.id) == file and client.files.content(file.id).content == b"a\n"
    others = [upload(client, b"b").id for _ in range(3)]
    assert [one.id for one in client.files.list(limit=2)] == [*others[::-1], file.id]
    page = client.files.list(limit=2)
    assert [one.id for one in page.data] == others[:0:-1] and page.has_more
    assert client.files.delete(file.id).deleted
    for gone in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="not found"):
            gone(file.id)


@pytest.mark.parametrize(
    "form, reason",
    [
        ({"data": {"purpose": "batch"}, "files": {"other": b"a"}}, "pass two fields"),
        ({"files": {"file": b"a"}}, "purpose"),
        ({"json": {}}, "multipart/form-data"),
        ({"content": b"--x", "headers": {"Content-Type": "multipart/form-data"}}, "boundary"),
        ({"data": {"purpose": "batch"}, "files": {"file": b"a"}, "headers": {"Origin": "http://evil.example"}}, "evil"),
    ],
)
def test_forms_that_are_refused(url, form, reason):
    answer = httpx.post(f"{url}/v1/files", **form)
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("url_of_list", ["/v1/files", "/v1/batches", "/v1/messages/batches"])
@pytest.mark.parametrize("query", [{"limit": "x"}, {"limit": "0"}, {"order": "zz"}])
def test_queries_that_are_refused(url, url_of_list, query):
    answer = httpx.get(url + url_of_list, params=query)
    (param,) = query
    assert answer.status_code == 400 and param in answer.json()["error"]["message"]


def test_files_have_purposes(client):
    batch, text = upload(client, b"a"), upload(client, b"b", purpose="user_data")
    assert [one.id for one in client.files.list(purpose="batch")] == [batch.id]
    assert [one.id for one in client.files.list(purpose="user_data")] == [text.id]
    assert not client.files.list(purpose="batch_output").data
    assert [one.id for one in client.files.list(order="asc")] == [batch.id, text.id]
    for ask in (lambda: upload(client, b"a", purpose="zz"), lambda: client.files.list(purpose="zz")):
        with pytest.raises(openai.BadRequestError, match="assistants, batch, fine-tune") as refused:
            ask()
        assert refused.value.param == "purpose"
    with pytest.raises(openai.BadRequestError):
        upload(client, b"a", purpose="batch_output")


def test_batches_of_messages_are_listed_backwards(url):
    with anthropic_client(url) as client:
        ids = [client.messages.batches.create(requests=[message("a")]).id for _ in range(4)][::-1]
        page = client.messages.batches.list(limit=2, before_id=ids[3])
        assert [one.id for one in page.data] == ids[1:3] and page.has_more
        assert (page.first_id, page.last_id) == (ids[1], ids[2])
        assert [one.id for one in client.messages.batches.list(before_id=ids[1])] == ids[:1]
        with pytest.raises(anthropic.BadRequestError, match="one of after_id and before_id"):
            client.messages.batches.list(before_id=ids[1], after_id=ids[2])


def test_a_file_can_be_named_in_a_message(url, client, engine):
    engine.max_model_len = 2_000
    file = client.files.create(file=("w.pdf", pdf("Rome is sunny")), purpose="user_data")
    part = {"type": "file", "file": {"file_id": file.id}}
    client.chat.completions.create(model="fake", messages=[{"role": "user", "content": [part]}])
    client.responses.create(
        model="fake", input=[{"role": "user", "content": [{"type": "input_file", "file_id": file.id}]}]
    )
    with anthropic_client(url) as other:
        block = {"type": "document", "source": {"type": "file", "file_id": file.id}}
        other.messages.create(model="fake", max_tokens=9, messages=[{"role": "user", "content": [block]}])
    assert len(engine.prompts) == 3 and all("Rome is sunny" in prompt for prompt in engine.prompts)


def test_a_batch(client, engine):
    wrong = line("d", n=0)
    batch = begin(client, jsonl(line("a"), line("b", "Well?"), wrong, {"custom_id": 3}), metadata={"of": "mine"})
    assert batch.status in ("validating", "in_progress") and batch.metadata == {"of": "mine"}
    done = ended(client.batches, batch, "completed")
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (4, 2, 2) and done.completed_at >= done.in_progress_at
    good = records(client, done.output_file_id)
    assert sorted(good) == ["a", "b"] and good["b"]["response"]["body"]["choices"][0]["message"]["content"] == REPLY
    bad = records(client, done.error_file_id)
    assert bad["d"]["response"]["status_code"] == 400 and bad[None]["error"]["code"] == "invalid_request"
    assert [one.id for one in client.batches.list()] == [batch.id]
    assert client.batches.cancel(batch.id).status == "completed"


@pytest.mark.parametrize(
    "endpoint, body",
    [("/v1/responses", {"input": "Hi"}), ("/v1/completions", {"prompt": "Hi"}), ("/v1/messages", {})],
)
def test_every_endpoint(client, endpoint, body):
    asked = {**line("a", url=endpoint), **({"body": {**body, "model": "fake"}} if body else {})}
    batch = begin(client, jsonl(asked, line("b", url="/v1/embeddings")), endpoint)
    done = ended(client.batches, batch, "completed")
    assert list(records(client, done.output_file_id)) == ["a"]
    assert records(client, done.error_file_id)["b"]["error"]["code"] == "invalid_url"


def test_a_line_has_no_files_and_continues_nothing(client):
    part = {"type": "file", "file": {"file_data": "SGk="}}
    begun = begin(client, jsonl(line("a", messages=[{"role": "user", "content": [part]}])))
    done = ended(client.batches, begun, "completed")
    error = records(client, done.error_file_id)["a"]["response"]["body"]["error"]
    assert "documents are not read here" in error["message"]
    asked = {**line("a", url="/v1/responses"), "body": {"input": "Hi", "previous_response_id": "x"}}
    begun = begin(client, jsonl(asked), "/v1/responses")
    done = ended(client.batches, begun, "completed")
    assert "continues no responses" in records(client, done.error_file_id)["a"]["response"]["body"]["error"]["message"]


def test_what_is_no_batch(client):
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.batches.create(input_file_id="file-x", endpoint="/v1/responses", completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        begin(client, b"", endpoint="/v1/embeddings")
    empty = begin(client, b"\n")
    failed = ended(client.batches, empty, "failed")
    assert failed.errors.data[0].code == "empty_file" and failed.failed_at
    long = begin(client, b'{"custom_id": "' + b"a" * LINE_BYTES + b'"}\n')
    done = ended(client.batches, long, "completed")
    assert records(client, done.error_file_id)[None]["error"]["code"] == "line_too_long"


def test_cancelling_keeps_what_is_there(client, engine):
    batch = begin(client, jsonl(line("a"), line("b", "HANG"), line("c", "HANG"), line("d", "HANG")))
    wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed)
    assert len(engine.running) == engine.max_num_seqs // 2  # others have room beside it
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = ended(client.batches, batch, "cancelled")
    assert list(records(client, done.output_file_id)) == ["a"] and done.cancelled_at and done.error_file_id is None
    assert not engine.running


def test_a_batch_of_messages(url, engine):
    with anthropic_client(url) as client:
        batch = client.messages.batches.create(requests=[message("a"), message("b", max_tokens=0)])
        assert batch.processing_status == "in_progress" and batch.request_counts.processing == 2
        done = ended(client.messages.batches, batch, "ended")
        assert (done.request_counts.succeeded, done.request_counts.errored) == (1, 1) and done.results_url
        results = {one.custom_id: one.result for one in client.messages.batches.results(batch.id)}
        assert results["a"].message.content[0].text == REPLY
        assert results["b"].error.error.type == "invalid_request_error"
        assert [one.id for one in client.messages.batches.list(limit=1)] == [batch.id]
        assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"
        with pytest.raises(anthropic.NotFoundError):
            client.messages.batches.retrieve(batch.id)


def test_a_batch_of_messages_has_documents_of_text_alone(url, engine):
    engine.max_model_len = 2_000
    text = {"type": "text", "media_type": "text/plain", "data": "Rome is sunny"}
    with anthropic_client(url) as client:
        requests = [
            message(kind, [{"type": "document", "source": source}])
            for kind, source in (("text", text), ("file", {"type": "file", "file_id": "file-1"}))
        ]
        batch = client.messages.batches.create(requests=requests)
        ended(client.messages.batches, batch, "ended")
        results = {one.custom_id: one.result for one in client.messages.batches.results(batch.id)}
    assert results["text"].message.content[0].text == REPLY and "Rome is sunny" in engine.prompts[0]
    assert "documents are not read here" in results["file"].error.error.message


def test_messages_that_are_cancelled(url, engine):
    with anthropic_client(url) as client:
        requests = [message(str(number), "HANG") for number in range(3)]
        batch = client.messages.batches.create(requests=requests)
        with pytest.raises(anthropic.BadRequestError, match="not ended"):
            client.messages.batches.delete(batch.id)
        client.messages.batches.cancel(batch.id)
        done = ended(client.messages.batches, batch, "ended")
        assert done.request_counts.canceled == 3
        assert {one.result.type for one in client.messages.batches.results(batch.id)} == {"canceled"}
        with pytest.raises(anthropic.BadRequestError, match="must differ"):
            client.messages.batches.create(requests=[requests[0]] * 2)


def test_each_key_has_its_own():
    with serving(api_key=("a", "b")) as url, openai_client(url, "a") as first, openai_client(url, "b") as second:
        batch = begin(first, jsonl(line("x")))
        done = ended(first.batches, batch, "completed")
        for ask in (
            lambda: second.files.content(done.output_file_id),
            lambda: second.files.delete(batch.input_file_id),
            lambda: second.batches.retrieve(batch.id),
            lambda: second.batches.cancel(batch.id),
            lambda: begin_with(second, batch.input_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
        assert not second.files.list().data and not second.batches.list().data
        part = {"type": "file", "file": {"file_id": batch.input_file_id}}
        with pytest.raises(openai.NotFoundError):
            second.chat.completions.create(model="fake", messages=[{"role": "user", "content": [part]}])
        assert first.files.retrieve(batch.input_file_id)


def begin_with(client, id):
    return client.batches.create(input_file_id=id, endpoint="/v1/responses", completion_window="24h")


def test_a_full_store_says_so():
    with client_of_server(storage_mib=0.05) as client:
        with pytest.raises(openai.BadRequestError, match="--storage-mib"):
            upload(client, b"x" * 2**16)
        kept = upload(client, b"x" * 2**14)
        assert client.files.retrieve(kept.id)
        long = base64.b64encode(b"x" * 9_000).decode()
        batch = begin(client, jsonl(*(line(f"{n}{long[:300]}", "a") for n in range(40))))
        failed = ended(client.batches, batch, "failed")
        assert failed.errors.data[0].code == "storage_full"


def test_answers_that_do_not_fit_beside_files_leave_nothing_behind(tmp_path):
    with client_of_server(storage_dir=str(tmp_path), storage_mib=2**-4) as client:
        beside = upload(client, b"x" * 2**15)
        batch = begin(client, jsonl(*(line(str(number), "a") for number in range(60))))
        failed = ended(client.batches, batch, "failed")
        assert failed.errors.data[0].code == "storage_full" and failed.output_file_id is None
        kept = {beside.id, batch.input_file_id}
        assert {one.id for one in client.files.list()} == kept
        assert {path.name for path in tmp_path.glob("files/*/*")} == kept
        assert not [*tmp_path.glob("files/new-*"), *tmp_path.glob("batches/*")]
        # Nothing else is counted either: there is room for as much as before, but for the batch's record.
        left = 2**16 - beside.bytes - batch_bytes(client, batch) - 3 * 2**12
        assert upload(client, b"y" * left)


def batch_bytes(client, batch):
    return client.files.retrieve(batch.input_file_id).bytes


def test_answers_count_while_a_batch_runs_and_once_when_they_are_there(tmp_path):
    with client_of_server(storage_dir=str(tmp_path), storage_mib=2**-4) as client:
        batch = begin(client, jsonl(*(line(str(number), "a") for number in range(30)), line("z", "HANG")))
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed == 30)
        (answers,) = tmp_path.glob("batches/*/answers.jsonl.partial")
        written, requests = answers.stat().st_size, batch_bytes(client, batch)
        assert written > 2**14
        beside = 2**16 - requests - written - 2**13
        with pytest.raises(openai.BadRequestError, match="--storage-mib"):
            upload(client, b"x" * (beside + 2**12))
        upload(client, b"x" * (beside - 2**12))  # which leaves no room for the answers once more
        client.batches.cancel(batch.id)
        done = ended(client.batches, batch, "cancelled")
        assert len(records(client, done.output_file_id)) == 30
        assert not [*tmp_path.glob("files/new-*"), *tmp_path.glob("batches/*")]


def test_results_that_do_not_fit_leave_nothing_behind(tmp_path):
    with (
        serving(storage_dir=str(tmp_path), storage_mib=2**-4) as url,
        openai_client(url) as files,
        anthropic_client(url) as client,
    ):
        upload(files, b"x" * 2**15)
        requests = [message(str(number)) for number in range(60)]
        batch = client.messages.batches.create(requests=requests)
        ended(client.messages.batches, batch, "ended")
        with pytest.raises(anthropic.BadRequestError, match="--storage-mib"):
            client.messages.batches.results(batch.id)
        assert not [*tmp_path.glob("batches/*")]


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device", "/secret")


def test_a_full_disk_keeps_no_file(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "copyfileobj", full)
    with client_of_server(storage_dir=str(tmp_path)) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            upload(client, b"x")
        assert caught.value.status_code == 503 and caught.value.code == "storage_failed"
        assert "secret" not in str(caught.value) and not [*tmp_path.glob("files/*")]
        assert f"{tmp_path / 'files'} cannot be read or written: [Errno 28] No space left" in caplog.text


def test_a_full_disk_keeps_no_batch_of_messages(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "write_bytes", full)
    with serving(storage_dir=str(tmp_path)) as url, anthropic_client(url) as client:
        with pytest.raises(anthropic.InternalServerError) as caught:
            client.messages.batches.create(requests=[message("a")])
        assert caught.value.status_code == 503
        assert "secret" not in str(caught.value) and not [*tmp_path.glob("batches/*")]


def test_a_server_that_keeps_nothing_says_so():
    refused = pytest.raises(openai.BadRequestError, match="stores nothing")
    with client_of_server(storage_mib=0) as client, refused:
        upload(client, b"x")


def test_a_batch_goes_on_after_a_restart(tmp_path):
    folder = str(tmp_path / "kept")
    with client_of_server(storage_dir=folder) as client:
        batch = begin(client, jsonl(line("a"), line("b", "HANG")))
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed)
    engine = FakeEngine()
    answered = FakeEngine.answer

    async def answer(self, request):
        request.prompt_token_ids = [token for token in request.prompt_token_ids if chr(token) not in "HANG"]
        async for output in answered(self, request):
            yield output

    engine.answer = answer.__get__(engine)
    with client_of_server(engine, storage_dir=folder) as client:
        done = ended(client.batches, batch, "completed")
        assert sorted(records(client, done.output_file_id)) == ["a", "b"]
        assert len(engine.prompts) == 1  # the first was answered before


def test_what_the_engine_does_not_live_to_answer_stays(tmp_path):
    engine = FakeEngine()
    with client_of_server(engine, storage_dir=str(tmp_path)) as client:
        batch = begin(client, jsonl(line("a", "DIE")))
        wait_until(lambda: not engine.is_alive)
        time.sleep(1)
        assert client.batches.retrieve(batch.id).status == "in_progress"
