"""A pytest plugin that runs llama.cpp's tests of its server, in a process of its own, with a server of ours in place of
each that they start."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from lists import Expected
from live import MODEL, Servers
from requests.structures import CaseInsensitiveDict

EXPECTED = Expected.read("llama_cpp")
SERVERS = Servers()
STORIES = frozenset(("(going|bed)+", "(Suddenly)+", "(princesses|everyone|kids|Anna|forest)+", "^ blue"))
"""What the tests' model, which was trained on stories for children, writes: of another model any text will do."""

METHODS = ("GET", "POST", "DELETE", "OPTIONS")
"""Those that llama.cpp allows pages of other origins."""

NAMES = ("gpt-3.5-turbo", "gpt-3.5-turbo-instruct", "gpt-4.1", "davinci-002", "codellama70b", "test")
"""Models that tests ask for: llama.cpp answers for any."""


def _flags(server: Any) -> tuple[str, ...]:
    """A server's options, as far as we have them."""
    values = {
        # A slot has its share of the context.
        "--max-model-len": server.n_ctx and server.n_ctx // (server.n_slots or 1),
        "--max-num-seqs": server.n_slots,
        "--default-max-tokens": server.n_predict if (server.n_predict or -1) > 0 else None,
        "--api-key": server.api_key,
        # Each request's that names none.
        "--override-generation-config": json.dumps({"temperature": server.temperature, "seed": server.seed}),
        "--chat-template": server.chat_template_file,
    }
    given = (part for flag, value in values.items() if value for part in (flag, str(value)))
    names = (server.model_alias or MODEL).split(",")
    shown = ("ui", not server.no_ui), ("slots", server.server_slots), ("metrics", server.server_metrics)
    switches = (f"--{name}" if is_on else f"--no-{name}" for name, is_on in shown)
    # By default pages of any origin may ask llama.cpp, with credentials.
    origins = (server.cors_origins,) if server.cors_origins else ("*", "--allow-credentials")
    cors = ("--allowed-origins", *origins, "--allowed-methods", *METHODS)
    names_of_metrics = ("--metrics-prefix", "llamacpp")
    return (*given, *switches, *names_of_metrics, *cors, "--served-model-name", *names, *NAMES)


def _start(server: Any, timeout_seconds: float = 0) -> None:
    # Tests of metrics count from the start.
    server.server_port = SERVERS.get(_flags(server), anew=server.server_metrics).port


def _asking(ask: Any) -> Any:
    """Of ``make_request``, one for our servers: llama.cpp's ``--verbose`` is a parameter of requests, and headers are
    written in small letters, which are the same names."""

    def request(server: Any, method: str, path: str, data: Any = None, *others: Any, **options: Any) -> Any:
        data = {**data, "verbose": True} if data and server.debug else data
        answer = ask(server, method, path, data, *others, **options)
        answer.headers = CaseInsensitiveDict(answer.headers)
        return answer

    return request


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    sys.modules["wget"] = types.ModuleType("wget")  # downloads llama.cpp's models
    sys.path.insert(0, str(early_config.rootpath))
    import utils

    matches = utils.match_regex
    utils.match_regex = lambda regex, text: bool(text) and (regex in STORIES or matches(regex, text))
    utils.ServerProcess.make_request = _asking(utils.ServerProcess.make_request)
    utils.ServerProcess.start = _start
    utils.ServerProcess.stop = lambda server: None
    utils.ServerPreset.load_all = lambda: None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if EXPECTED.leaves_out(collection_path.name) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    EXPECTED.mark(items, {item: f"{item.path.name}::{item.nodeid.partition('::')[2]}" for item in items})
