"""A pytest plugin that runs vLLM's tests of its entrypoints, in a process of its own: ``vllm`` is a stand-in, and
``RemoteOpenAIServer``, which all these tests ask, starts a server of ours with the flags that they give it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from lists import Expected
from live import Servers, transformers_tokenizer

EXPECTED = Expected.read("vllm")
SERVERS = Servers()
LEFT_OUT = {
    **{"--dtype": 1, "--max-num-seqs": 1, "--gpu-memory-utilization": 1, "--runner": 1},
    **{"--enable-lora": 0, "--lora-modules": 1, "--max-lora-rank": 1, "--max-cpu-loras": 1},
}
"""Flags of vLLM's tests that are about the memory of its GPUs or about LoRA adapters, and how many values they have."""

OURS = ("--metrics-prefix", "vllm", "--default-max-tokens", "512")
"""vLLM's names of metrics; and answers without a limit of their own end within the minute that some clients wait."""


class RemoteOpenAIServer:
    """What vLLM's tests start and ask: ``model`` is a name by which our one model is served."""

    DUMMY_API_KEY = "token-abc123"
    show_hidden_metrics = False

    def __init__(
        self, model: str, vllm_serve_args: Sequence[str], *, env_dict: Mapping[str, str] | None = None, **_: Any
    ) -> None:
        key = (env_dict or {}).get("VLLM_API_KEY")
        flags = (*_of_ours(vllm_serve_args), *(("--api-key", key) if key else ()))
        named = () if "--served-model-name" in flags else ("--served-model-name", model)
        self.live = SERVERS.get((*flags, *named, *OURS))
        self.uds = self.live.url.removeprefix("unix:") if self.live.port is None else None
        self.url_root = self.live.url if self.uds is None else "http://localhost"
        self.host, self.port, self.proc = "127.0.0.1", self.live.port, self.live.process

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        """The next tests that ask for these flags get the same server."""

    def url_for(self, *parts: str) -> str:
        return "/".join((self.url_root, *parts))

    def get_client(self, **options: Any) -> Any:
        import openai

        return openai.OpenAI(base_url=self.url_for("v1"), **self._options(options))

    def get_async_client(self, **options: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **self._options(options))

    def get_async_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(base_url=self.url_root, **self._options(options))

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 600, **options}


def _of_ours(flags: Sequence[str]) -> tuple[str, ...]:
    """The flags of a test without ``LEFT_OUT``."""
    kept, waiting = [], iter(flags)
    for flag in waiting:
        if (values := LEFT_OUT.get(flag.replace("_", "-"))) is None:
            kept.append(flag)
        for _ in range(values or 0):
            next(waiting)
    return tuple(kept)


class _StandIn(types.ModuleType):
    """A module of vLLM's that has every name: these tests import much of which they use little."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


STAND_INS = frozenset(("tests.utils", "tests.conftest", "tests.entrypoints.openai.chat_completion.test_serving_chat"))
"""Modules beside ``vllm`` that tests import, and that are not there or need vLLM itself."""


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any module of vLLM, and ``STAND_INS``."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] == "vllm" or name in STAND_INS:
            return importlib.util.spec_from_loader(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        for name, value in _values().get(module.__name__, {}).items():
            setattr(module, name, value)


def _values() -> dict[str, dict[str, Any]]:
    """What the tests use of what they import."""
    from shadowkv import __version__

    platform = MagicMock(**{f"is_{kind}.return_value": False for kind in ("rocm", "cuda", "cpu", "xpu", "tpu")})
    envs, version = (
        {"VLLM_USE_RUST_FRONTEND": False},
        {"__version__": __version__, "_prev_minor_version": lambda: "0.32"},
    )
    return {
        "vllm.platforms": {"current_platform": platform},
        "vllm.model_executor.model_loader.weight_utils": {"download_weights_from_hf": lambda model, **_: model},
        "vllm.tokenizers": {"get_tokenizer": lambda **_: transformers_tokenizer()},
        "vllm.version": version,
        "vllm.config": {"ModelConfig": lambda **_: MagicMock(get_vocab_size=lambda: len(transformers_tokenizer()))},
        "vllm": {"envs": SimpleNamespace(**envs), "version": SimpleNamespace(**version)},
        "vllm.envs": envs,
        "vllm.transformers_utils.repo_utils": {
            "hf_api": lambda: MagicMock(snapshot_download=lambda repo_id: repo_id),
        },
        "tests.utils": {"RemoteOpenAIServer": RemoteOpenAIServer, "ROCM_EXTRA_ARGS": []},
    }


sys.meta_path.insert(0, _StandIns())


def _own_name(config: pytest.Config, path: Path) -> str:
    return path.relative_to(config.rootpath / "tests/entrypoints").as_posix()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    below = config.rootpath / "tests/entrypoints" in collection_path.parents
    return True if below and EXPECTED.leaves_out(_own_name(config, collection_path)) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    file = {item: _own_name(config, item.path) for item in items}
    EXPECTED.mark(items, {item: f"{file[item]}::{item.nodeid.partition('::')[2]}" for item in items})


@pytest.fixture(scope="session")
def local_asset_server() -> None:
    """Has images, which tests of metrics take for models that see."""


@pytest.fixture(autouse=True)
def own_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that load the tokenizer of a model by its name get that of the model which is served by this name."""
    tokenizer = transformers_tokenizer()
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: tokenizer)
