"""vLLM's, SGLang's and llama.cpp's own tests of their servers against ours: whatever is in no list passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from sources import LLAMA_CPP, SGLANG, VLLM, Source

HERE = Path(__file__).parent

VLLM_CHAT = ("batched_chat_completions", "chat", "chat_completion", "chat_echo", "chat_logit_bias_validation") + (
    "enable_force_include_usage",
    "include_reasoning",
    "logprob_token_ids",
    "root_path",
)
VLLM_RESPONSES = ("basic", "function_call", "simple", "stateful")
VLLM_PARTS = {
    "anthropic": ("anthropic", "openai/test_return_tokens_as_ids.py"),
    "chat": tuple(f"openai/chat_completion/test_{name}.py" for name in VLLM_CHAT),
    "responses": tuple(f"openai/responses/test_{name}.py" for name in VLLM_RESPONSES),
    "tools": (
        "openai/chat_completion/test_completion_with_function_calling.py",
        "serve/instrumentator/test_metrics.py",
    ),
    "completion": ("openai/completion", "openai/test_chunked_prompt.py", "openai/test_return_token_ids.py"),
    "serve": tuple(
        f"serve/{name}.py"
        for name in (
            "instrumentator/test_basic",
            "instrumentator/test_orca_metrics",
            "instrumentator/test_uds",
            "middleware/test_optional_middleware",
            "tokenize/test_tokenization",
        )
    ),
}
LLAMA_CPP_PARTS = {
    "chat": ("chat_completion", "compat_oai_responses", "stream"),
    "anthropic": ("compat_anthropic", "basic", "metrics"),
    "completion": ("completion", "ctx_shift", "ignore_eos", "tokenize", "security"),
}


def _run(source: Source, below: str, plugin: str, names: list[str]) -> None:
    """Fails where pytest does, in a process of its own, for its plugin puts stand-ins in the place of modules."""
    try:
        root = source.unpacked() / below
    except (OSError, httpx.HTTPError) as error:
        archive = source.path.rpartition("/")[2]
        pytest.fail(f"{archive} cannot be fetched from PyPI: {type(error).__name__}: {error}", pytrace=False)
    command = [sys.executable, "-m", "pytest", "-p", plugin, "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-c", os.devnull, "--rootdir", str(root), "-q", "-rfExXs", "--tb=short", "-W", "ignore", *names]
    paths = os.pathsep.join((str(HERE), str(HERE.parents[1])))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "2"}
    ran = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    print(ran.stdout[-20000:], ran.stderr[-5000:], sep="\n")
    assert ran.returncode == 0, f"{plugin}: {ran.stdout.strip().splitlines()[-1:]}"


@pytest.mark.peers
@pytest.mark.parametrize("part", VLLM_PARTS)
def test_vllm(part: str) -> None:
    _run(VLLM, ".", "vllm_plugin", [f"tests/entrypoints/{name}" for name in VLLM_PARTS[part]])


@pytest.mark.peers
@pytest.mark.parametrize("part", LLAMA_CPP_PARTS)
def test_llama_cpp(part: str) -> None:
    below = "vendor/llama.cpp/tools/server/tests"
    names = [f"unit/test_{name}.py" for name in LLAMA_CPP_PARTS[part]]
    _run(LLAMA_CPP, below, "llama_cpp_plugin", [*names, "-m", "not slow"])


@pytest.mark.peers
def test_sglang() -> None:
    _run(SGLANG, ".", "sglang_cases", [str(HERE / "sglang_cases.py")])
