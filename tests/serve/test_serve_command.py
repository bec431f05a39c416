"""The command line: what is wrong is said in a line, before a model is loaded."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from shadowkv.serve import __main__ as command
from shadowkv.serve.process import FILES_BESIDE


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    def load(config, compare):
        raise MemoryError("not even one sequence fits")

    monkeypatch.setattr(command, "start_engine", load)
    monkeypatch.setattr("signal.signal", lambda *_: None)


def error_line(capsys) -> str:
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and err.count("\n") == 1, err
    return err


def test_help_needs_no_torch():
    code = (
        "import sys, shadowkv.serve.__main__ as m\ntry: m.main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert "--served-model-name" in result.stdout and "--kv" in result.stdout


def test_help_where_there_are_no_limits_of_files():
    code = "import sys\nsys.modules['resource'] = None  # as on Windows\nimport shadowkv.serve.__main__ as m\n"
    code += "from shadowkv.serve.process import allow_open_files\nassert allow_open_files(10**9) == 10**9\n"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}m.main(['--help'])"], capture_output=True, text=True, timeout=120
    )
    help = " ".join(result.stdout.split())
    assert "--limit-concurrency N" in help and "(default: 2048, or fewer" in help, result.stderr


def process(template):
    """Of an engine with what the command asks before it serves."""
    engine = SimpleNamespace(describe=list, model_name="x", tokenizer=SimpleNamespace(chat_template=template))
    return SimpleNamespace(clients=[engine], stop=float)


def test_calls_of_tools_that_nobody_could_read(monkeypatch, capsys):
    served = []
    monkeypatch.setattr("shadowkv.serve.app.serve", lambda *args: served.append(args[3].settings.tool_call_parser))
    flags = ["--port", "0", "--enable-auto-tool-choice"]
    for template, more, code in (("{{ tools }} {{ messages }}", [], 2), ("<tool_call>", [], 0), (None, ["hermes"], 0)):
        monkeypatch.setattr(command, "start_engine", lambda config, compare, template=template: process(template))
        assert command.main([*flags, *(["--tool-call-parser", *more] if more else [])]) == code
        assert not code or "add --tool-call-parser hermes|qwen3_coder|" in error_line(capsys)
    assert served == [None, "hermes"]


@pytest.mark.parametrize(
    "hard, flags, limit",
    [
        (1024, [], 512),
        (100, [], 1),
        (4096, [], 2048),
        (4096, ["--limit-concurrency", "3000"], 3000),
        (1024, ["--limit-concurrency", "512"], 512),
        (100, ["--limit-concurrency", "1"], 1),
        (1024, ["--limit-concurrency", "2048"], None),
    ],
)
def test_where_few_files_may_be_open(monkeypatch, capsys, caplog, hard, flags, limit):
    served, raised = [], []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    monkeypatch.setattr(command, "start_engine", lambda *_: process("{{ messages }}"))
    monkeypatch.setattr("shadowkv.serve.app.serve", lambda *args: served.append(args[3].settings.limit_concurrency))
    assert command.main(["--port", "0", *flags]) == (2 if limit is None else 0)
    told = f"--limit-concurrency 2048 needs 2560 open files, and the system allows {hard} (ulimit -Hn)"
    if limit is None:
        assert f"{told}; raise this limit, or pass at most 512" in error_line(capsys) and not served and not raised
    else:
        assert served == [limit] and raised == [(min(hard, limit + FILES_BESIDE), hard)]
        assert [record.getMessage() for record in caplog.records] == (
            [f"{told}: {limit} is used"] if not flags and limit < 2048 else []
        )


@pytest.mark.parametrize(
    "flags, words", [(["--max-num-seqs", "0"], "--max-num-seqs 0 must"), (["--port", "0"], "not even one")]
)
def test_config_and_load_errors(capsys, flags, words):
    assert command.main(flags) == 2
    assert words in error_line(capsys)


def test_port_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert command.main(["--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen on 127.0.0.1 port" in error_line(capsys)


def test_unknown_host(capsys):
    assert command.main(["--host", "no such host"]) == 2
    assert "cannot listen on no such host" in error_line(capsys)


def test_batch_files(capsys, tmp_path):
    source = tmp_path / "in.jsonl"
    assert command.main(["--input", str(source), "--output", str(tmp_path / "out.jsonl")]) == 2
    assert f"--input {source} is not a file" in error_line(capsys)
    source.touch()
    assert command.main(["--input", str(source), "--output", str(tmp_path / "no" / "out.jsonl")]) == 2
    assert f"the folder {tmp_path / 'no'} does not exist" in error_line(capsys)
    assert command.main(["--input", str(source), "--output", str(tmp_path)]) == 2
    assert "cannot be written" in error_line(capsys)


@pytest.mark.parametrize("flags", [["--input", "x"], ["--output", "x"], ["--resume"], ["--no-such-flag"]])
def test_flags(capsys, flags):
    with pytest.raises(SystemExit) as ended:
        command.main(flags)
    assert ended.value.code == 2 and "error: " in capsys.readouterr().err


def test_interrupt_while_loading(monkeypatch, capsys):
    class Loading:
        stopped = False

        @property
        def clients(self):
            raise KeyboardInterrupt

        def stop(self, seconds):
            self.stopped = True

    process = Loading()
    monkeypatch.setattr(command, "start_engine", lambda config, compare: process)
    assert command.main(["--port", "0"]) == 130
    assert process.stopped
