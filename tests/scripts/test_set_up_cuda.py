"""What make does about the CUDA ops before a server starts: builds them, or stops with the reason and the remedy."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import set_up_cuda
import torch

NOT_FOUND = set_up_cuda.FINDER["CompilerNotFound"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A Hopper whose torch is of CUDA 13, with a compiler; ``done`` has what was installed and built."""
    here = SimpleNamespace(done=[], compiler=True)

    def find_compiler() -> str:
        if not here.compiler:
            raise NOT_FOUND("a compiler is not installed. To install it: pip install it")
        return "nvcc"

    def run(command: list[str], **options: Any) -> None:
        assert command[1:4] == ["-m", "pip", "install"] and options == {"check": True}
        here.done.append(tuple(command[4:]))
        here.compiler = True

    monkeypatch.setattr(set_up_cuda, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(set_up_cuda.subprocess, "run", run)
    monkeypatch.setitem(set_up_cuda.BUILDER, "find_compiler", find_compiler)
    monkeypatch.setitem(set_up_cuda.BUILDER, "build", lambda: here.done.append("built"))
    monkeypatch.setitem(set_up_cuda.FINDER, "find_ninja", lambda: "ninja")
    monkeypatch.setattr("sys.argv", ["set_up_cuda.py", "-c", "constraints.txt"])
    monkeypatch.delenv("SHADOWKV_CUDA_OPS", raising=False)
    return here


def stops(capsys: pytest.CaptureFixture[str]) -> str:
    """What is said where make stops."""
    assert set_up_cuda.main() == 1
    told = capsys.readouterr().err
    assert told.startswith("error: this machine has an NVIDIA GPU, but ")
    assert told.endswith("(or go on without the CUDA ops: SHADOWKV_CUDA_OPS=no make ...)\n")
    return told


def test_with_a_toolkit_it_is_used(machine: SimpleNamespace) -> None:
    assert set_up_cuda.main() == 0
    assert machine.done == ["built"]


@pytest.mark.parametrize(
    ("why", "extras"),
    [
        ("a GPU of CUDA 13", "json,page,gpu"),
        ("no GPU", "json,page"),
        ("no CUDA ops", "json,page"),
        ("CUDA 12", "json,page"),
        ("an old GPU", "json,page"),
        ("a CPU build", "json,page"),
    ],
)
def test_products_with_weights_in_few_bits_are_installed_where_a_gpu_runs_them(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], why: str, extras: str
) -> None:
    monkeypatch.setattr("sys.argv", ["set_up_cuda.py", "--extras"])
    if why == "no GPU":
        monkeypatch.setattr(set_up_cuda, "has_nvidia_gpu", lambda: False)
    elif why == "no CUDA ops":
        monkeypatch.setenv("SHADOWKV_CUDA_OPS", "no")
    elif why in ("CUDA 12", "a CPU build"):
        monkeypatch.setattr(torch.version, "cuda", "12.8" if why == "CUDA 12" else None)
    elif why == "an old GPU":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert set_up_cuda.main() == 0
    assert capsys.readouterr().out == f"{extras}\n" and not machine.done


def test_without_a_toolkit_the_compiler_of_pypi_is_installed(machine: SimpleNamespace) -> None:
    machine.compiler = False
    assert set_up_cuda.main() == 0
    assert machine.done == [("-c", "constraints.txt", *set_up_cuda.FINDER["PACKAGES"]), "built"]


def test_of_cuda_12_pypi_has_no_compiler(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    machine.compiler = False
    assert "a compiler is not installed" in stops(capsys)
    machine.compiler = True
    assert set_up_cuda.main() == 0
    assert machine.done == ["built"]


@pytest.mark.parametrize("how", ["a CPU build", "an old driver", "an old torch", "errors in a source"])
def test_what_cannot_be_helped_stops_with_the_reason(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    def fail(error: Exception) -> None:
        raise error

    if how == "a CPU build":
        monkeypatch.setattr(torch.version, "cuda", None)
        expected = "is a CPU build, and the server would run on the CPU: install a CUDA build"
    elif how == "an old driver":
        old = RuntimeError("The NVIDIA driver on your system is too old (found version 12040)")
        monkeypatch.setattr(torch.cuda, "init", lambda: fail(old))
        expected = "is too old (found version 12040): update NVIDIA's driver"
    elif how == "an old torch":
        monkeypatch.setattr(torch, "__version__", "2.9.1")
        expected = "the CUDA ops need torch 2.11 or later, this is 2.9.1"
    else:
        failed = subprocess.CalledProcessError(1, ["ninja"])
        monkeypatch.setitem(set_up_cuda.BUILDER, "build", lambda: fail(failed))
        expected = "returned non-zero exit status 1"
    assert expected in stops(capsys)
    assert not machine.done


def test_nothing_is_done_where_it_is_not_wanted_or_cannot_run(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert set_up_cuda.main() == 0
    assert "a GPU has a compute capability below 8.0" in capsys.readouterr().out
    monkeypatch.setenv("SHADOWKV_CUDA_OPS", "no")
    assert set_up_cuda.main() == 0
    monkeypatch.setenv("SHADOWKV_CUDA_OPS", "maybe")
    with pytest.raises(SystemExit, match="SHADOWKV_CUDA_OPS='maybe' must be one of auto, yes, no"):
        set_up_cuda.main()
    monkeypatch.setattr(set_up_cuda, "has_nvidia_gpu", lambda: False)
    assert set_up_cuda.main() == 0
    assert not machine.done
