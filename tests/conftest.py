"""Which files are tested first, and which quarter of all; seeds and examples that are drawn, the same ones in every run
unless others are asked for; disks that are waited for; the memory of a GPU that several processes test on."""

import os
import signal
import zlib
from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from importlib import import_module
from pathlib import Path

import pytest
import torch
from quarters import of_quarter

from shadowkv import baselines
from shadowkv.kvcache import codecs, parts, presets
from shadowkv.ops import registry

baselines.register()  # tests draw from all presets, codecs and parts

LONGEST = (
    *("test_cuda_linear_attention.py", "test_cuda_smollm2.py", "test_cuda_tiers.py", "test_cuda_compiles.py"),
    "test_cuda_quantized_models.py",
    *("test_cuda_sources.py", "test_replicas.py", "test_smollm2.py", "test_batch.py", "test_soak.py"),
    *("test_interpreted.py", "test_snapshots.py", "test_serve_end_to_end.py", "test_tensor_parallel.py"),
    *("test_lifetimes.py", "test_exactness.py"),
)
"""Files that take longest, from the first to begin on: at the end other processes would have nothing left to do."""


DRAW = os.environ.get("DRAW", "0")
"""Says which seeds and examples are drawn: of the same, a test fails always or never."""

with suppress(ImportError):  # a machine with a GPU may not have it
    from hypothesis import HealthCheck, settings

    # A slow machine draws examples slowly, which is no fault of a test.
    slow = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("tests", derandomize=DRAW == "0", database=None, **slow)
    settings.load_profile("tests")

# Shells have what they start in the background ignore Ctrl-C, which is tested.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quarter", type=int, choices=range(4), help="run one quarter of the tests")


@pytest.hookimpl(trylast=True)  # of what the other options leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the longest first, in their order, and leaves a quarter where one is asked for."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    if (quarter := config.getoption("quarter")) is not None:
        kept = of_quarter(items, quarter)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


@pytest.fixture(scope="session", autouse=True)
def backends() -> None:
    """Backends that have another's ``missing`` are imported before a test puts something else in its place."""
    for file in (Path(__file__).parents[1] / "shadowkv/ops").glob("*/*.py"):
        if any("import" in line and "missing" in line for line in file.read_text(encoding="utf-8").splitlines()):
            import_module(f"shadowkv.ops.{file.parent.name}.{file.stem}")


@pytest.fixture
def drawn(request: pytest.FixtureRequest) -> int:
    """A seed of the test's own; a failing test prints it."""
    value = zlib.crc32(f"{DRAW} {request.node.nodeid}".encode())
    print(f"seed {value}")
    return value


@pytest.fixture(params=["drawn"])  # in a test's id, from which its seed follows
def seed(drawn: int) -> int:
    """Also seeds torch; a failing test prints it."""
    torch.manual_seed(drawn)
    return drawn


@pytest.fixture(autouse=True)
def signals_are_put_back() -> Iterator[None]:
    """Commands that a test runs in its own process leave handlers of theirs."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def registries_are_put_back() -> Iterator[None]:
    """What a test registers is gone after it."""
    of_axes = [*parts.REGISTERED.values(), *codecs.NAMES_OF_PARTS.values()]
    registries = [presets.PRESETS, codecs.ROW_CODECS, codecs.LATENT_CODECS, registry.REGISTERED, *of_axes]
    before = [copy(one) for one in registries]
    yield
    for one, entries in zip(registries, before, strict=True):
        one.clear()
        one.update(entries)


@pytest.fixture(autouse=True)
def disks_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than any takes that works, and though so small a model computes faster than it restores: what is found
    cached does not depend on the machine. A test that is about the waiting sets its own."""
    for place in ("saves", "chains"):
        monkeypatch.setattr(f"shadowkv.prefix_cache.{place}.FETCH_SECONDS", 120.0)
        monkeypatch.setattr(f"shadowkv.prefix_cache.{place}.MAX_FETCH_SECONDS", 120.0)
    monkeypatch.setattr("shadowkv.prefix_cache.disk_reports.OPENING_SECONDS", 120.0)
    monkeypatch.setattr("shadowkv.prefix_cache.chains.Chains.seconds", lambda *_: 0.0)


@pytest.fixture(autouse=torch.cuda.is_available())
def memory_for_others() -> Iterator[None]:
    """Gives back what a test left cached, if it is much."""
    yield
    if torch.cuda.memory_reserved() > 2**31:
        torch.cuda.empty_cache()
