"""No answer is lost or doubled, and no request: whatever the files are called, and however many runs want them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from shadowkv.serve import __main__ as command
from shadowkv.serve.batch.answers import run_batch
from shadowkv.serve.batch.files import BatchFiles, Sink
from shadowkv.serve.process import exit_on_signals

REQUESTS = [
    json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}})
    for name in "abc"
]


@pytest.fixture
def files(tmp_path):
    files = BatchFiles(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    files.input.write_text("\n".join(REQUESTS) + "\n")
    return files


def go(engine, files, resume=False):
    files = BatchFiles(files.input, files.output, resume)
    with files.held():
        return run_batch(engine, "fake", files, 1)


def ids(path):
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def same(folder):
    return folder / "in.jsonl"


def spelled_otherwise(folder):
    return folder / ".." / folder.name / "in.jsonl"


def linked(link, output, how):
    """An ``output`` that is written by way of ``link``, which is the input."""

    def make(folder):
        getattr(folder / link, how)(folder / "in.jsonl")
        return folder / output

    return make


OUTPUTS = {
    "same": same,
    "spelled otherwise": spelled_otherwise,
    "symbolic link": linked("link", "link", "symlink_to"),
    "hard link": linked("link", "link", "hardlink_to"),
    "partial file": linked("out.partial", "out", "hardlink_to"),
    "rewritten file": linked("out.partial.new", "out", "hardlink_to"),
    "lock": linked("out.lock", "out", "symlink_to"),
}


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_requests_are_not_overwritten(files, tmp_path, output, resume):
    output = output(tmp_path)
    before, found = files.input.read_bytes(), sorted(tmp_path.iterdir())
    words = rf"--output {output} would overwrite .* --input {files.input}; name another"
    with pytest.raises(ValueError, match=words), BatchFiles(files.input, output, resume).held():
        pass
    assert files.input.read_bytes() == before and sorted(tmp_path.iterdir()) == found


def test_answers_are_not_overwritten(files, engine):
    assert go(engine, files) == 0
    before = files.output.read_bytes()
    with pytest.raises(ValueError, match=f"--output {files.output} exists already; pass --resume"):
        go(engine, files)
    assert files.output.read_bytes() == before and len(engine.prompts) == 3
    assert go(engine, files, resume=True) == 0
    assert files.output.read_bytes() == before and len(engine.prompts) == 3


def test_an_output_that_is_no_file(files):
    device = BatchFiles(files.input, Path("/dev/null"), resume=True)
    with pytest.raises(ValueError, match="--output /dev/null cannot be written: it is no regular file"), device.held():
        pass


def test_an_output_by_a_symbolic_link_goes_where_it_points(files, engine, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "answers"
    files.output.symlink_to(target)
    assert go(engine, files) == 0
    assert files.output.is_symlink() and ids(target) == ["a", "b", "c"]
    with pytest.raises(ValueError, match="exists already"):
        go(engine, files)


OTHER_RUN = """
import sys
from pathlib import Path
from shadowkv.serve.batch.files import BatchFiles
with BatchFiles(Path(sys.argv[1]), Path(sys.argv[2]), resume=True).held():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("resume", [False, True])
def test_two_runs_cannot_write_the_same_output_and_one_that_crashed_can_be_followed(files, engine, tmp_path, resume):
    other_name = tmp_path / "link.jsonl"
    other_name.symlink_to(files.output)
    with subprocess.Popen(
        [sys.executable, "-c", OTHER_RUN, str(files.input), str(other_name)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        try:
            assert other.stdout.readline() == "held\n"
            with pytest.raises(ValueError, match=f"another run is writing --output {files.output}; wait for its end"):
                go(engine, files, resume)
            assert not engine.prompts
        finally:
            other.kill()
    assert go(engine, files, resume) == 0
    assert ids(files.output) == ["a", "b", "c"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "link.jsonl", "out.jsonl"]


def test_the_command_has_its_files_before_a_model_is_loaded(files, monkeypatch, capsys):
    def load(config, compare):
        assert files.lock.exists()
        raise MemoryError("not even one sequence fits")

    monkeypatch.setattr(command, "start_engine", load)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    flags = ["--input", str(files.input), "--output", str(files.output)]
    assert command.main(flags) == 2 and "not even one" in capsys.readouterr().err
    assert not files.lock.exists()
    files.output.touch()
    assert command.main(flags) == 2 and "exists already" in capsys.readouterr().err


def test_a_resumed_run_that_gets_nowhere_keeps_the_answers_there_were(files, engine, capsys):
    assert go(engine, files) == 0
    files.output.rename(files.partial)
    dead = json.dumps({"custom_id": "d", "method": "POST", "url": "/v1/completions", "body": {"prompt": "DIE"}})
    files.input.write_text("\n".join([dead, *REQUESTS]) + "\n")
    assert go(engine, files, resume=True) == 1
    assert " has 3 answers; " in capsys.readouterr().err
    assert ids(files.partial) == ["a", "b", "c"]


def test_a_last_record_without_its_newline_is_one(files, engine):
    assert go(engine, files) == 0
    files.output.write_bytes(files.output.read_bytes().rstrip(b"\n"))
    files.input.write_text("")
    assert go(engine, files, resume=True) == 0
    assert ids(files.output) == ["a", "b", "c"]


def test_a_request_that_has_changed_since_is_answered_again(files, engine):
    assert go(engine, files) == 0
    before = records(files.output)
    respelled = json.dumps(dict(reversed(json.loads(REQUESTS[0]).items())), indent=None, separators=(",", ":"))
    files.input.write_text("\n".join([respelled, REQUESTS[1].replace("Hi", "Ho"), REQUESTS[2]]) + "\n")
    for _ in range(2):  # the second time it is the same
        assert go(engine, files, resume=True) == 0
        assert len(engine.prompts) == 4 and engine.prompts[3].endswith("Ho")
        found = records(files.output)
        assert found[:2] == [before[0], before[2]] and len(found) == 3
        assert found[2]["custom_id"] == "b" and found[2]["response"]["status_code"] == 200


def test_a_request_that_failed_is_answered_again(files, engine):
    wrong = [REQUESTS[0].replace("prompt", "promt"), REQUESTS[1].replace("Hi", "FAIL"), REQUESTS[2], "{half"]
    files.input.write_text("\n".join(wrong) + "\n")
    assert go(engine, files) == 0
    assert [record["response"] and record["response"]["status_code"] for record in records(files.output)] == [
        *(400, 500, 200, None)
    ]
    files.input.write_text("\n".join(REQUESTS) + "\n")
    assert go(engine, files, resume=True) == 0
    assert ids(files.output) == ["c", "a", "b"]
    assert {record["response"]["status_code"] for record in records(files.output)} == {200}


def test_random_ids_of_earlier_versions_say_nothing_of_their_requests(files, engine):
    assert go(engine, files) == 0
    old = [{**record, "id": f"batch_req_{uuid.uuid4().hex}"} for record in records(files.output)]
    files.output.write_text("".join(json.dumps(record) + "\n" for record in old))
    assert go(engine, files, resume=True) == 0
    assert records(files.output) == old and len(engine.prompts) == 3


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_crash_while_a_run_resumes_loses_nothing(files, engine, monkeypatch, call, capsys):
    assert go(engine, files) == 0
    files.output.rename(files.partial)
    before = files.partial.read_bytes()

    def crash(*_):
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(*((Sink, "write") if call == "write" else (os, call)), crash)
        assert go(engine, files, resume=True) == 1
    assert "the disk is gone" in capsys.readouterr().err
    assert files.partial.read_bytes() == before
    files.rewritten.write_bytes(b"what a crash left\n")
    assert go(engine, files, resume=True) == 0
    assert files.output.read_bytes() == before and not files.rewritten.exists() and len(engine.prompts) == 3


def test_sigterm_keeps_what_is_done_and_frees_the_files(files, engine, capsys, monkeypatch):
    hangs = json.dumps({"custom_id": "d", "method": "POST", "url": "/v1/completions", "body": {"prompt": "HANG"}})
    files.input.write_text("\n".join([*REQUESTS, hangs]) + "\n")
    write = Sink.write
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    exit_on_signals()

    def terminated(sink, record):
        write(sink, record)
        if record["custom_id"] == "c":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Sink, "write", terminated)
    try:
        with pytest.raises(SystemExit) as ended:
            go(engine, files)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended.value.code == 143 and not engine.running
    assert "terminated: " in (error := capsys.readouterr().err) and f"{files.partial} has " in error
    assert ids(files.partial) == ["a", "b", "c"] and not files.lock.exists()


def test_answers_are_on_the_disk_before_they_have_their_name(files, engine, monkeypatch):
    calls = []

    def watch(name):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args: calls.append(name) or call(*args))

    watch("fsync")
    watch("replace")
    assert go(engine, files) == 0
    assert calls[-3:] == ["fsync", "replace", "fsync"]
