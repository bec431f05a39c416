"""The commands that messages name work for the way in which the package was installed."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
import torch

from shadowkv import installation

METADATA = """Metadata-Version: 2.4
Name: shadowkv-engine
Version: 0.1.0
Requires-Dist: torch>=2.9
Requires-Dist: xgrammar; extra == "json"
Requires-Dist: ray[data,serve]<2.64; extra == "ray"
Requires-Dist: ray[tune]; extra == "raytune"
Requires-Dist: uvloop; platform_system != "Windows"
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an installation's metadata, without sources beside the package; Python is in .venv."""
    folder = tmp_path / "shadowkv_engine-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA)
    monkeypatch.setattr(installation, "ROOT", tmp_path)
    monkeypatch.setattr(installation, "distribution", lambda name: PathDistribution(folder))
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv/bin/python"))
    monkeypatch.chdir(tmp_path)
    return folder


def came_from(folder: Path, url: str) -> None:
    (folder / "direct_url.json").write_text(json.dumps({"url": url, "archive_info": {}}))


def test_an_extra_is_what_it_requires(installed: Path) -> None:
    assert installation.adding("json") == ".venv/bin/python -m pip install xgrammar"
    assert installation.adding("ray") == ".venv/bin/python -m pip install 'ray[data,serve]<2.64'"


def test_of_a_clone_on_the_path_an_extra_is_the_clones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none(name: str) -> None:
        raise installation.PackageNotFoundError(name)

    monkeypatch.setattr(installation, "distribution", none)
    monkeypatch.chdir(tmp_path)
    python = shlex.quote(sys.executable)
    assert installation.adding("json") == f"{python} -m pip install '{installation.ROOT}[json]'"


def test_a_clone_builds_where_it_is(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc/build_cuda.py").touch()
    assert installation.building_cuda() == ".venv/bin/python csrc/build_cuda.py"
    assert installation.building_cpu() == ".venv/bin/python -m pip install -v --no-build-isolation --no-deps -e ."


def test_an_sdist_is_installed_again_and_a_wheel_replaced(installed: Path, tmp_path: Path) -> None:
    again = ".venv/bin/python -m pip install -v --no-build-isolation --no-deps --force-reinstall"
    sdist = tmp_path / "shadowkv_engine-0.1.0.tar.gz"
    sdist.touch()
    came_from(installed, sdist.as_uri())
    assert installation.building_cpu() == installation.building_cuda() == f"{again} {sdist.name}"
    came_from(installed, (tmp_path / "shadowkv_engine-0.1.0-cp311-cp311-linux_x86_64.whl").as_uri())
    assert installation.building_cuda() == "install a wheel that has them; 'make wheel' in a clone builds one"
    sdist.unlink()
    came_from(installed, sdist.as_uri())
    assert "'make wheel'" in installation.building_cpu()


def test_a_build_with_cpp_ops_asks_for_the_torch_that_can_load_them(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=Path(__file__).parents[1], check=True, capture_output=True)
    [metadata] = tmp_path.glob("*.egg-info/PKG-INFO")
    needed = [line for line in metadata.read_text().splitlines() if line.startswith("Requires-Dist: torch")]
    assert needed == [f"Requires-Dist: torch=={'.'.join(torch.__version__.split('.')[:2])}.*"]


def test_no_message_or_document_names_a_distribution_that_no_index_has() -> None:
    """But the Makefile, where it is installed already."""
    root = Path(__file__).parents[1]
    files = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True).stdout.split()
    texts = [file for file in files if file.endswith((".py", ".md", ".yaml")) and file != "CHANGELOG.md"]
    naming = [file for file in texts if "shadowkv-engine" + "[" in (root / file).read_text(encoding="utf-8")]
    assert naming == []
