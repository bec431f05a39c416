"""Threads of OpenMP sleep while they wait for each other, where a process has no reason to let them spin."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

LLM = "from shadowkv import LLM"
SORTED = "from shadowkv import CompletionOutput, LLM, SamplingParams"
EVAL = "from shadowkv.eval.__main__ import main; main(['stress', '--model', 'no-such-model', '--out', 'none'])"


def spins(code: str, **environment: str) -> int:
    """How often a thread looks before it sleeps, in a process that runs ``code``."""
    set_here = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**set_here, "OMP_DISPLAY_ENV": "verbose", **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    found = re.search(r"GOMP_SPINCOUNT = '(\w+)'", done.stderr)
    if found is None:
        pytest.skip("PyTorch has another OpenMP")
    return sys.maxsize if found[1] == "INFINITE" else int(found[1])


@pytest.mark.parametrize("code", [LLM, SORTED, EVAL], ids=["LLM", "other names first", "eval"])
def test_threads_sleep(code: str) -> None:
    assert spins(code) == 0 < spins("import torch")


def test_whoever_sets_the_variable_decides() -> None:
    assert spins(LLM, OMP_WAIT_POLICY="active") > 0
