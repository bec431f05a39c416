"""Peers' own tests, from the source distributions that PyPI has of them: fetched once, held to a checksum, unpacked as
far as they are tests. Nothing of them is in this repository."""

from __future__ import annotations

import hashlib
import tarfile
from dataclasses import dataclass
from pathlib import Path

import httpx
from filelock import FileLock

from shadowkv.models.downloads import cache_dir

FILES = "https://files.pythonhosted.org/packages"
SECONDS = 60
"""Without a byte, after which a download has failed; the next one goes on from there."""

TRIES = 3


@dataclass(frozen=True)
class Source:
    """A source distribution.

    Attributes:
        path: of the file, below ``FILES``.
        sha256: digest of the file.
        folders: what is unpacked, below the archive's only folder.
    """

    path: str
    sha256: str
    folders: tuple[str, ...]

    def unpacked(self) -> Path:
        """The archive's folder, with those of its folders that are unpacked. Raises OSError and httpx.HTTPError."""
        archive = cache_dir() / "peers" / Path(self.path).name
        folder = archive.with_name(archive.name.removesuffix(".tar.gz"))
        archive.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            # Named by what is unpacked: another list of folders unpacks anew.
            done = folder / hashlib.sha256("\n".join(self.folders).encode()).hexdigest()
            if not done.exists():
                self._fetch(archive)
                with tarfile.open(archive) as tar:
                    tar.extractall(folder.parent, [one for one in tar if self._is_wanted(one.name)], filter="data")
                done.touch()
        return folder

    def _is_wanted(self, name: str) -> bool:
        _, _, inside = name.partition("/")
        return any(inside == folder or inside.startswith(f"{folder}/") for folder in self.folders)

    def _fetch(self, archive: Path) -> None:
        if archive.exists():
            return
        growing = archive.with_name(f"{archive.name}.incomplete")
        for attempt in range(1, TRIES + 1):
            try:
                self._grow(growing)
                break
            except httpx.TransportError:
                if attempt == TRIES:
                    raise
        digest = hashlib.sha256(growing.read_bytes()).hexdigest()
        if digest != self.sha256:
            growing.unlink()
            raise OSError(f"{archive.name} has the SHA-256 {digest}, not {self.sha256}")
        growing.replace(archive)

    def _grow(self, file: Path) -> None:
        """Fetches what a file lacks of the archive."""
        with file.open("ab") as sink:
            headers = {"Range": f"bytes={sink.tell()}-"} if sink.tell() else {}
            with httpx.stream("GET", f"{FILES}/{self.path}", headers=headers, timeout=SECONDS) as answer:
                if answer.status_code != httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:  # all of it is here
                    answer.raise_for_status()
                    if answer.status_code == httpx.codes.OK:
                        sink.truncate(0)
                    for piece in answer.iter_bytes():
                        sink.write(piece)


VLLM = Source(
    "f7/25/aa5684e9c59d6fc75f78926b7f15e8d9adc7de2d9e6e7575b80776ad8169/vllm-0.33.0.tar.gz",
    "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
    ("tests/__init__.py", "tests/entrypoints"),
)
SGLANG = Source(
    "42/38/feb04f6478b90315606fcd62b798917e7fcee9f1d7d84b01cf477398045e/sglang-0.5.10.post1.tar.gz",
    "01f7adfe7cde85b238fb0e1bae4b31d494e19d1471cf35ff3c5489a02f9d2263",
    ("sglang/test/kits", "sglang/test/tool_call_test_runner.py"),
)
LLAMA_CPP = Source(
    "ec/e9/e7de2b0463ea3ffbf0ede6cb21b58c1258a8f6521aae45ca773a59fe7cf3/llama_cpp_python-0.3.36.tar.gz",
    "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    ("vendor/llama.cpp/tools/server/tests", "vendor/llama.cpp/models/templates"),
)
"""llama.cpp is not on PyPI; its bindings' source distribution has it whole."""
