"""Batch files on the fake engine."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from pathlib import Path

import pytest
from fake_engine import REPLY

from shadowkv.serve.batch.run import MAX_REASONS, OTHER_REASONS


def line(custom_id, url="/v1/completions", method="POST", **body):
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


def records(path):
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def test_bad_lines_become_records_and_the_rest_go_on(run, engine, capsys):
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    lines = [
        line("chat", "/v1/chat/completions", model="fake", **chat),
        "",
        line("text", prompt="Hi", max_tokens=3),
        "{not json",
        "[1]",
        line(5, prompt="Hi"),
        line("text", prompt="again"),
        line("get", method="GET", prompt="Hi"),
        line("url", "/v1/embeddings", prompt="Hi"),
        json.dumps({"custom_id": "body", "method": "POST", "url": "/v1/completions", "body": 3}),
        line("param", prompt="Hi", suffix="x"),
        line("model", prompt="Hi", model="other"),
        line("long", prompt="x" * 300),
        line("stream", prompt="Hi", stream=True),
        line("fails", prompt="FAIL"),
        line("last", prompt="Hi"),
    ]
    assert run(lines) == 0
    found = records(run.files.output)
    assert len(found) == len(lines) - 1 and len({record["id"] for record in found}) == len(found)
    assert all(set(record) == {"id", "custom_id", "response", "error"} for record in found)
    refused = [record["error"] for record in found if record["response"] is None]
    assert sorted(error["code"] for error in refused) == sorted(
        ["invalid_json", "duplicate_custom_id", "invalid_method", "invalid_url"] + ["invalid_request"] * 3
    )
    assert any(error["message"].startswith("line 4: not valid JSON") for error in refused)
    answered = {record["custom_id"]: record["response"] for record in found if record["response"] is not None}
    assert all(record["error"] is None for record in found if record["response"] is not None)
    statuses = {name: response["status_code"] for name, response in answered.items()}
    assert statuses == dict(chat=200, text=200, last=200, param=400, model=404, long=400, stream=400, fails=500)
    assert answered["chat"]["body"]["choices"][0]["message"]["content"] == REPLY
    assert answered["text"]["body"]["choices"][0]["text"] == REPLY[:3]
    assert answered["text"]["request_id"] == answered["text"]["body"]["id"]
    assert answered["long"]["body"]["error"]["code"] == "context_length_exceeded"
    assert not run.files.partial.exists()
    out, err = capsys.readouterr()
    assert "15 requests, 12 failed" in out
    assert "1 failed: line 4: not valid JSON: " in err and "1 failed, param first: suffix" in err
    assert err.count(" failed") == MAX_REASONS + 1 and err.endswith(f" first: {OTHER_REASONS}\n")


def test_equal_reasons_are_one_line(run, capsys):
    assert run([line(str(n), prompt="Hi", model="other") for n in range(30)]) == 0
    (said,) = [text for text in capsys.readouterr().err.splitlines() if " failed" in text]
    assert said == "30 failed, 0 first: the model 'other' does not exist; this server has 'fake'"


def test_requests_run_together_up_to_the_limit(run, engine):
    assert run([line(str(i), prompt="SLEEP") for i in range(20)], concurrency=6) == 0
    assert engine.most_running == 6
    assert sorted(int(record["custom_id"]) for record in records(run.files.output)) == list(range(20))


def test_empty_file(run):
    assert run([]) == 0
    assert records(run.files.output) == []


@pytest.mark.parametrize("prompt, code", [("Hi", 0), ("DIE", 1)])
def test_the_engines_sockets_are_closed_at_the_end(run, engine, monkeypatch, prompt, code):
    ended = []
    monkeypatch.setattr(engine, "disconnect", lambda: ended.append(len(engine.prompts)))
    assert run([line("a", prompt=prompt)]) == code
    assert ended == [1]


def test_a_dead_engine_ends_the_run_and_keeps_what_is_done(run, capsys):
    lines = [line("first", prompt="Hi"), line("second", prompt="DIE"), line("third", prompt="Hi")]
    assert run(lines, concurrency=1) == 1
    assert [record["custom_id"] for record in records(run.files.partial)] == ["first"]
    assert "the engine has died: boom" in capsys.readouterr().err
    assert not run.files.output.exists()
    with pytest.raises(ValueError, match="interrupted run"), run.files.held():
        pass


def test_nothing_is_kept_of_a_run_without_answers(run, capsys):
    assert run([line("first", prompt="DIE")]) == 1
    assert "no answers yet" in capsys.readouterr().err
    assert [path.name for path in run.files.output.parent.iterdir()] == ["in.jsonl"]


@pytest.fixture
def interruptible():
    """Ctrl-C as in a terminal: processes that a shell starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupt_keeps_what_is_done(run, engine, capsys, interruptible):
    def interrupt():
        while not (run.files.partial.exists() and run.files.partial.read_text(encoding="utf-8").endswith("\n")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)  # to the process, as Ctrl-C: it wakes the main thread

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert run([line("first", prompt="Hi"), line("second", prompt="HANG")]) == 130
    thread.join()
    assert [record["custom_id"] for record in records(run.files.partial)] == ["first"]
    assert str(run.files.partial) in capsys.readouterr().err
    assert not engine.running


def test_resume_answers_the_rest_only(run, engine, capsys):
    lines = [line(str(i), prompt=f"{i}") for i in range(6)] + ["{bad", line("2", prompt="twice"), line("x", "/v2")]
    assert run([*lines[:3], *lines[6:], line("die", prompt="DIE")], concurrency=1) == 1
    assert " has 6 answers; " in capsys.readouterr().err
    with run.files.partial.open("ab") as file:
        file.write(b'{"id": "cut off in the mi')
    engine.is_alive = True
    engine.prompts.clear()
    assert run([*lines[:3], *lines[6:], *lines[3:6]], resume=True) == 0
    assert sorted(engine.prompts) == ["\x013", "\x014", "\x015"]
    found = records(run.files.output)
    assert [record["custom_id"] for record in found[:3]] == ["0", "1", "2"]
    assert sorted(str(record["custom_id"]) for record in found[3:]) == ["2", "3", "4", "5", "None", "x"]
    assert not run.files.partial.exists()
    assert "3 requests answered before\n6 requests, 3 failed" in capsys.readouterr().out
    engine.prompts.clear()
    assert run([*lines[:3], *lines[6:], *lines[3:6], line("new", prompt="new")], resume=True) == 0
    assert engine.prompts == ["\x01new"]
    assert records(run.files.output)[:6] == [record for record in found if record["response"]]
    assert len(records(run.files.output)) == 10


@pytest.mark.parametrize(
    "text",
    [
        '{"some": "data"}',
        '{"custom_id": "a", "error": "boom"}',
        '{"custom_id": "a", "response": [200]}',
        '{"custom_id": ["a"], "response": null, "error": null}',
        "[]",
    ],
)
def test_resume_of_what_is_no_output(run, capsys, text):
    run.files.output.write_text(f"{text}\n")
    assert run([line("a", prompt="Hi")], resume=True) == 1
    assert "line 1 is not a record" in capsys.readouterr().err
    assert run.files.output.read_text() == f"{text}\n"


def test_a_full_disk_ends_the_run_and_leaves_whole_lines(run, engine, capsys, tmp_path):
    lines = [line(str(i), prompt="Hi") for i in range(12)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3500, hard))  # as a full disk: the write is short, the next one fails
    try:
        assert run(lines, concurrency=2) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    error = capsys.readouterr().err
    kept = records(run.files.partial)
    told = f"error: cannot write {run.files.partial}: File too large; {run.files.partial} has {len(kept)} answers; "
    assert told in error
    assert 1 < len(kept) < 12 and "Traceback" not in error
    assert not engine.running and not run.files.output.exists()
    assert run(lines, resume=True) == 0
    assert sorted(int(record["custom_id"]) for record in records(run.files.output)) == list(range(12))


def test_a_full_queue_is_waited_for(run, engine, monkeypatch):
    monkeypatch.setattr("shadowkv.serve.batch.answers.BUSY_SECONDS", 0.01)
    engine.room = engine.max_queued_seqs = 2
    lines = [line(str(i), prompt=["Hi", "SLEEP"]) for i in range(3)] + [line("never", prompt=["a", "b", "c"])]
    assert run(lines, concurrency=4) == 0
    found = {record["custom_id"]: record["response"] for record in records(run.files.output)}
    assert {name: response["status_code"] for name, response in found.items()} == {
        **dict.fromkeys("012", 200),
        "never": 400,
    }
    assert "queues 2 at most" in found["never"]["body"]["error"]["message"]


def test_the_batch_of_the_examples(run):
    example = Path(__file__).resolve().parents[2] / "examples" / "batch.jsonl"
    assert run([text for text in example.read_text(encoding="utf-8").splitlines()]) == 0
    assert all(record["response"]["status_code"] == 200 for record in records(run.files.output))
