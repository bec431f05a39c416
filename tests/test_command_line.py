"""The command ``shadowkv``: subcommands are their packages' own, help without PyTorch, say mistakes in a line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shadowkv import cli


def test_every_command_helps_without_pytorch():
    code = "import sys\nfrom shadowkv import cli\n"
    code += "for name in ['--help', *cli.COMMANDS]:\n"
    code += "    try: cli.main([name, '--help'])\n    except SystemExit as ended: assert ended.code == 0\n"
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    for name in cli.COMMANDS:
        assert f"usage: shadowkv {name} " in done.stdout and f"\n  {name} " in done.stdout


@pytest.mark.parametrize(
    "arguments, line",
    [
        ([], "error: the following arguments are required: COMMAND (see shadowkv --help)"),
        (["run"], "error: argument COMMAND: invalid choice: 'run' "),
        (["serve", "--bad"], "error: unrecognized arguments: --bad (see shadowkv serve --help)"),
        (["serve", "--port", "70000"], "error: --port 70000 must be between 0 and 65535 (see shadowkv serve --help)"),
        (["eval", "ruler", "--bad"], "error: "),
        (["plan"], "error: the following arguments are required: --context (see shadowkv plan --help)"),
        (["bench", "serve", "--num-prompts", "x"], "error: argument --num-prompts: invalid int value: 'x' "),
        (["cache", "ls"], "error: the following arguments are required: --dir (see shadowkv cache ls --help)"),
    ],
)
def test_mistakes_are_one_line(arguments, line, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and not out and err.startswith(line) and err.count("\n") == 1 and "--help)" in err


def test_a_command_gets_the_other_arguments_and_its_code_is_ours(capsys, tmp_path):
    assert cli.main(["cache", "ls", "--dir", str(tmp_path / "none")]) == 2
    assert cli.main(["bench", "serve", "--base-url", "http://127.0.0.1:9/v1"]) == 2
    assert "no server at http://127.0.0.1:9/v1" in capsys.readouterr().err
