"""Which CUDA compiler builds the CUDA ops, and what is said where none fits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shadowkv.ops import cuda_compiler
from shadowkv.ops.cuda_compiler import PACKAGES, CompilerNotFound, find_compiler

ROOT = Path(__file__).parents[2]


def put_nvcc(home: Path, version: str) -> Path:
    """A program that prints its version like nvcc."""
    program = home / "bin/nvcc"
    program.parent.mkdir(parents=True)
    release = version.rpartition(".")[0]
    program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{version}'\n")
    program.chmod(0o755)
    return program


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a C++ compiler and without CUDA. Returns the folder of Python's packages."""
    gcc = tmp_path / "path/g++"
    gcc.parent.mkdir()
    gcc.touch(0o755)
    monkeypatch.setenv("PATH", str(gcc.parent))
    for name in ("CUDA_HOME", "NVCC_CCBIN"):
        monkeypatch.delenv(name, raising=False)
    packages = tmp_path / "site-packages/nvidia"
    packages.mkdir(parents=True)
    monkeypatch.setattr(cuda_compiler, "INSTALLED", tmp_path / "usr-local-cuda")
    monkeypatch.setattr(cuda_compiler, "_packages", lambda: [packages])
    return packages


def test_without_any_the_command_that_installs_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    for major in (13, None):
        with pytest.raises(
            CompilerNotFound, match=r"is not installed\. To install it: .*python\S* -m pip install"
        ) as told:
            find_compiler(major)
        assert all(package in str(told.value) for package in PACKAGES)


def test_for_cuda_12_pypi_has_none_and_that_is_told(machine: Path) -> None:
    put_nvcc(machine / "cu13", "13.0.88")
    with pytest.raises(CompilerNotFound, match=r"of CUDA 12, which torch was built with, is not installed") as told:
        find_compiler(12)
    assert "compilers of other versions: nvcc 13.0.88 of PyPI's packages" in str(told.value)
    assert "NVIDIA's toolkit of CUDA 12" in str(told.value)
    assert "pip install" not in str(told.value)


def test_a_toolkit_goes_before_packages_and_what_does_not_fit_is_passed_over(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvcc(machine / "cu13", "13.0.88")
    of_packages = find_compiler(13)
    assert (of_packages.origin, of_packages.version) == ("PyPI's packages", "13.0.88")
    assert of_packages.link_flags == (f"-L{machine}/cu13/lib",)

    installed = put_nvcc(cuda_compiler.INSTALLED, "12.8.93")
    assert find_compiler(13) == of_packages
    assert find_compiler(12).nvcc == find_compiler(None).nvcc == installed

    own = put_nvcc(tmp_path / "own", "13.2.10")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "own"))
    assert (find_compiler(13).nvcc, find_compiler(13).major, find_compiler(13).link_flags) == (own, 13, ())


def test_a_compiler_that_does_not_run_is_none(machine: Path) -> None:
    put_nvcc(machine / "cu13", "13.0.88").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(CompilerNotFound, match="is not installed"):
        find_compiler(13)


def test_nvcc_needs_a_cpp_compiler(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvcc(machine / "cu13", "13.0.88")
    monkeypatch.setenv("NVCC_CCBIN", "no-such-compiler")
    with pytest.raises(
        CompilerNotFound, match=r"nvcc 13\.0\.88 of PyPI's packages .* needs a C\+\+ compiler: install g\+\+"
    ):
        find_compiler(13)


def test_ninja_is_found_beside_python_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "venv/bin/python"))
    with pytest.raises(CompilerNotFound, match=r"ninja is not installed: .*venv/bin/python -m pip install ninja"):
        cuda_compiler.find_ninja()
    ninja = tmp_path / "venv/bin/ninja"
    ninja.parent.mkdir(parents=True)
    ninja.touch(0o755)
    assert cuda_compiler.find_ninja() == str(ninja)


def test_the_extra_installs_the_packages() -> None:
    [extra] = re.findall(r"^nvcc = (\[.*\])", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert re.findall(r'"(.+?)"', extra) == [*PACKAGES]
