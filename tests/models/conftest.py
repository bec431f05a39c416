"""The real model of the tests, SmolLM2-135M-Instruct, fetched once through the catalogue; and the command line."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from bad_files import SECONDS, Serve, little_memory

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.process.launch import EngineProcess
from shadowkv.models import LoadedModel, load_model
from shadowkv.models.sources import fetch
from shadowkv.serve.__main__ import main
from shadowkv.serve.start import start_engine

SMOLLM2 = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """Its GGUF file."""
    return fetch(SMOLLM2)


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """It, loaded by name."""
    return load_model(SMOLLM2, dtype="float32")


def start_what_loads(config: EngineConfig, compare: str | None) -> EngineProcess:
    """The engine's process as a server starts it, where its model loads. One that does not is refused by this process:
    hundreds of others would take a second and a half each."""
    print(f"loading {config.model}", file=sys.stderr)
    Engine(config).close()
    return start_engine(config, compare)


@pytest.fixture
def serve(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Serve:
    """Runs ``python -m shadowkv.serve`` over no requests: its exit code, and all that it wrote to stderr."""
    requests = tmp_path / "requests.jsonl"
    requests.write_text("")

    def run(model: Path, *flags: str) -> tuple[int, str]:
        answers = tmp_path / "answers.jsonl"
        answers.unlink(missing_ok=True)
        files = ["--input", str(requests), "--output", str(answers)]
        start = time.monotonic()
        with little_memory():
            code = main(["--model", str(model), "--device", "cpu", *files, *flags], start_what_loads)
        assert time.monotonic() - start < SECONDS
        return code, capfd.readouterr().err

    return run
