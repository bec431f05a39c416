"""The real model of the tests: SmolLM2-135M-Instruct, fetched once through the catalogue."""

from __future__ import annotations

from pathlib import Path

import pytest

from shadowkv.models import LoadedModel, load_model
from shadowkv.models.catalogue import fetch

SMOLLM2 = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """Its GGUF file."""
    return fetch(SMOLLM2)


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """It, loaded by name."""
    return load_model(SMOLLM2, dtype="float32")
