"""SGLang's tests of its HTTP server, as far as its source distribution has them: kits of cases, and a runner of calls
of tools. Run by pytest, in a process of its own, with a server of ours."""

from __future__ import annotations

import importlib.util
import sys
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import openai
import pytest
from lists import Expected
from live import MODEL, Servers
from sources import SGLANG

EXPECTED = Expected.read("sglang")
TESTS = SGLANG.unpacked() / "sglang/test"


def _module(path: Path) -> ModuleType:
    """A file of SGLang's, whose imports of the rest of SGLang get stand-ins."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # its dataclasses look it up
    spec.loader.exec_module(module)
    return module


for _name in ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.test", "sglang.test.test_utils"):
    sys.modules[_name] = MagicMock()

SERVERS = Servers()
FLAGS = ("--max-model-len", "8192", "--seed", "1")


class Served(unittest.TestCase):
    """What SGLang's ``CustomTestCase`` and its fixture are to the kits."""

    model = MODEL
    base_url: str
    process: Any

    @classmethod
    def setUpClass(cls) -> None:
        live = SERVERS.get(FLAGS)
        cls.base_url, cls.process = live.url, live.process


def _cases() -> dict[str, type]:
    """A class of tests for each kit whose requests go to a server of the kit's own choosing."""
    classes = {}
    for kit in ("matched_stop", "json_constrained", "regex_constrained", "ebnf_constrained", "abort_timeout"):
        for name, mixin in vars(_module(TESTS / f"kits/{kit}_kit.py")).items():
            if name.endswith("Mixin"):
                classes[name] = type(f"Test{name}", (mixin, Served), {"__module__": __name__})
    return classes


globals().update({f"Test{name}": case for name, case in _cases().items()})
CALLS = {name: call for name, call, _ in _module(TESTS / "tool_call_test_runner.py")._TESTS}


@pytest.mark.parametrize("name", CALLS)
def test_tool_calls(name: str) -> None:
    live = SERVERS.get(FLAGS)
    CALLS[name](openai.Client(api_key="sk-test", base_url=f"{live.url}/v1"), MODEL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    EXPECTED.mark(items, {item: f"{item.path.name}::{item.nodeid.partition('::')[2]}" for item in items})
