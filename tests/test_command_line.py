"""The command ``shadowkv``: subcommands are their packages' own, help without PyTorch, say mistakes in a line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shadowkv import cli
from shadowkv.command_line import one_line
from shadowkv.eval.records.policies import local_policies
from shadowkv.kvcache.listing import policies_text
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.wording import SettingsError


def test_every_command_helps_without_pytorch():
    code = "import sys\nfrom shadowkv import cli\n"
    code += "for name in ['--help', *cli.COMMANDS]:\n"
    code += "    try: cli.main([name, '--help'])\n    except SystemExit as ended: assert ended.code == 0\n"
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    for name in cli.COMMANDS:
        assert f"usage: shadowkv {name} " in done.stdout and f"\n  {name} " in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        "serve --kv help",
        "serve --compare help",
        "ray batch --input a --output b --kv help",
        "eval niah --out a --kv full help",
        "plan --context 1 --kv turbo help",
        "doctor --kv help",
    ],
)
def test_help_instead_of_a_policy_lists_policies(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments.split())
    out, err = capsys.readouterr()
    assert not ended.value.code and not err and out == policies_text() + "\n"


@pytest.mark.parametrize(
    "arguments, line",
    [
        ([], "error: the following arguments are required: COMMAND (see shadowkv --help)"),
        (["run"], "error: argument COMMAND: invalid choice: 'run' "),
        (["serve", "--bad"], "error: unrecognized arguments: --bad (see shadowkv serve --help)"),
        (["eval", "ruler", "--bad"], "error: "),
        (["plan"], "error: the following arguments are required: --context (see shadowkv plan --help)"),
        (["bench", "serve", "--num-prompts", "x"], "error: argument --num-prompts: 'x' is no whole number "),
        (
            ["serve", "--quality-meter", "3%"],
            "error: argument --quality-meter: '3%' must be a share of steps from 0 to 1",
        ),
        (
            ["serve", "--kv-budget", "0.03"],
            "error: --kv-budget is a field of the policy: --kv turbo:budget=0.03 (see shadowkv serve --help)",
        ),
        (["plan", "--context", "1", "--kv", "ful"], "error: argument --kv: unknown KV preset 'ful'; known: full, "),
        (
            ["cache", "ls"],
            "error: --dir DIR is missing: name the directory that a server has as --kv-disk-dir "
            "(see shadowkv cache ls --help)",
        ),
    ],
)
def test_mistakes_are_one_line(arguments, line, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and not out and err.startswith(line) and err.count("\n") == 1 and "--help)" in err


@pytest.mark.parametrize(
    "arguments, line",
    [
        ("serve --max-num-seqs -3", "--max-num-seqs -3 must be at least 1"),
        ("ray batch --max-num-seqs -3 --input a --output b", "--max-num-seqs -3 must be at least 1"),
        (
            "serve --role decode",
            "--role decode needs --kv-disk-dir, the directory that prefill and decode servers ",
        ),
        (
            "serve --send-timeout -1 --max-body-mib 0",
            "--max-body-mib 0.0 must be finite and positive; --send-timeout -1.0 must be finite and not negative",
        ),
        ("serve --port 70000 --uds=", "--port 70000 must be between 0 and 65535; --uds '' must not be empty"),
        ("serve --allow-credentials", "--allow-credentials has no meaning without --allowed-origins"),
        ("plan --context 64 --fetch-buffer 0.5", "--fetch-buffer 0.5 must be 0 or a finite number of at least 1"),
        ("plan --context 64 --tensor-parallel-size 99", "--tensor-parallel-size 99 is more than the model's 9 query"),
        (
            "plan --context 64 --kv full:rank=3",
            "--kv full:rank=3: this KV policy cannot be used: rank=3 ",
        ),
        (
            "plan --context 8193",
            "--context 8193 is more than the 8192 positions that this llama model supports; to ",
        ),
        (
            'plan --context 64 --hf-overrides {"rope_thet":1e6}',
            "--hf-overrides on ",
        ),
        (
            'eval stress --out o --load-format dummy --hf-overrides {"rope_scaling":3}',
            "--hf-overrides on ",
        ),
        (
            'serve --rope-theta 1e6 --hf-overrides {"rope_theta":1e6}',
            "--rope-theta 1000000.0 is also in --hf-overrides: set only one of them",
        ),
        ("eval stress --out o --rope-theta -1", "--rope-theta -1.0 must be finite and positive"),
        (
            "eval stress --out o --load-format dummy --length 8193",
            "--length 8193 is more than the 8192 positions ",
        ),
        ("eval stress --out o --load-format dummy --device tpu", "--device tpu is not auto, cpu, cuda or cuda:N"),
        (
            "eval fidelity --out o --load-format dummy --kv full quest --budget 2048 --prompt-tokens 8192",
            "--prompt-tokens + --new-tokens 8448 is more than the 8192 positions that this llama model supports",
        ),
        ("bench serve --num-prompts 0", "--num-prompts 0 must be positive"),
        ("serve --host-memory-gib inf", "--host-memory-gib inf must be finite and not negative"),
        ("serve --max-body-mib inf", "--max-body-mib inf must be finite and positive"),
        ("serve --storage-mib inf", "--storage-mib inf must be finite and not negative"),
        ("plan --context 64 --gpu-memory-gib inf", "--gpu-memory-gib inf must be finite and positive"),
        ("plan --context 64 --device-bandwidth-tbs inf", "--device-bandwidth-tbs inf must be finite and positive"),
        ("plan --context 64 --host-memory-gib inf", "--host-memory-gib inf must be finite and not negative"),
        ("serve --allowed-origins example.com *", "--allowed-origins example.com must be an origin with its scheme"),
        ("eval stress --out o --base-url localhost:80", "--base-url localhost:80 must be a URL, such as http://loc"),
        (
            "eval stress --out o --base-url http://localhost:1/v1 --model served-name",
            "prompts are measured with the tokenizer of served-name: 'served-name' is no directory",
        ),
    ],
)
def test_settings_that_cannot_be_are_named_by_their_flags(arguments, line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert cli.main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert not out and err.splitlines()[-1].startswith(f"error: {line}"), err


def test_a_policy_that_is_refused_beside_others_is_named():
    shape = ModelShape(num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=64)
    with pytest.raises(SettingsError) as caught:
        local_policies(["full", "quest", "turbo:rank=998"], [64], shape)
    assert one_line(caught.value).startswith("--kv turbo:rank=998, --budget 64: this KV policy cannot be used: rank=")


def test_a_command_gets_the_other_arguments_and_its_code_is_ours(capsys, tmp_path):
    assert cli.main(["cache", "ls", "--dir", str(tmp_path / "none")]) == 2
    assert cli.main(["bench", "serve", "--base-url", "http://127.0.0.1:9/v1"]) == 2
    assert "no server at http://127.0.0.1:9/v1" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["plan", "--context", "8k"], ["eval", "ruler", "--out", "x"], ["serve"]])
def test_ctrl_c_while_importing_is_one_word(arguments):
    """A real signal, as PyTorch, or for a server its library for HTTP, is about to be imported."""
    assert_stops_at(arguments, "'torch', 'fastapi'")


def test_ctrl_c_is_not_lost_in_an_import_that_makes_another_error_of_it():
    assert_stops_at(["serve"], "'datetime',")


def assert_stops_at(arguments, names):
    code = "import os, signal, sys\nfrom shadowkv import cli\n"
    code += "class Finder:\n    def find_spec(name, *_):\n"
    code += "        if name in (NAMES): os.kill(os.getpid(), signal.SIGINT)\n"
    code = code.replace("NAMES", names)
    code += f"sys.meta_path.insert(0, Finder)\nsys.exit(cli.main({arguments}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 130 and done.stderr.splitlines()[-1] == "stopped" and "Traceback" not in done.stderr
