"""The CUDA sources compile for every GPU that they are built for, and kernels spill no registers on a Hopper.

Needs a CUDA compiler, which ``make test-slow`` installs, and no GPU; takes about four minutes of CPU time.
"""

from __future__ import annotations

import json
import os
import re
import runpy
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

CSRC = Path(__file__).parent.parent / "csrc"
BUILDER = runpy.run_path(str(CSRC / "build_cuda.py"))
SOURCES = BUILDER["bindings"]()
SOURCES["attend_codecs"] = CSRC.parent / "tests/ops/own_codecs/attend_codecs.cu"
TUNED_FOR = BUILDER["TUNED_FOR"]
LONGEST = ("attend_latents_sm90", TUNED_FOR)
"""A third of all: begun first and asked for last, so that nothing waits for it alone."""

CASES = [(op, gpu) for op in SOURCES for gpu in BUILDER["GPUS"] if (op, gpu) != ("attend_codecs", TUNED_FOR)]
"""The tests' own codecs have nothing that is for one GPU alone."""
CASES.sort(key=LONGEST.__eq__)

SPILLING = {
    re.compile(r"attend_coded_kernelI\w+Lloyd3E+(?:NS_11LevelValuesIS2_)?E+Lb0E"): 4,
    re.compile(r"attend_mixed_kernelI\w+Lb0E"): 16,
}
"""Bytes that some kernels may spill. Those of attention over coded tokens with 3-bit values, without a mean of the
keys, read an address back once a page: with five blocks a multiprocessor they were measured, with 12 bytes, to be 11 %
faster than with three that kept all in registers. Of attention over mixed latents with more than four queries a head
those warps spill that turn queries, for which nobody waits: with registers that the others lack it was 4 % slower."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str], Future[CompletedProcess[str]]]]:
    """What the tests that run ask for."""
    calls = (getattr(item, "callspec", None) for item in request.session.items if item.path == request.path)
    wanted = [(call.params["op"], call.params["gpu"]) for call in calls if call is not None]
    wanted.sort(key=LONGEST.__ne__)
    folder = tmp_path_factory.mktemp("cubins")
    BUILDER["find_compiler"]()  # raises where there is none, and says what to install
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        yield {
            (op, gpu): threads.submit(BUILDER["compile_for"], SOURCES[op], gpu, folder / f"{op}.{gpu}")
            for op, gpu in wanted
        }


@pytest.mark.parametrize(("op", "gpu"), CASES)
def test_an_op_compiles_and_spills_nothing_on_a_hopper(
    op: str, gpu: str, compiled: dict[tuple[str, str], Future[CompletedProcess[str]]]
) -> None:
    done = compiled[op, gpu].result()
    assert done.returncode == 0, done.stderr
    kernels = re.findall(r"Function properties for (\w+)\n.*?(\d+) bytes spill stores, (\d+) bytes spill", done.stderr)
    assert kernels, done.stderr
    if gpu == TUNED_FOR:
        spilled = [(name, max(map(int, count))) for name, *count in kernels if count != ["0", "0"]]
        for name, most in spilled:
            assert most <= max((allowed for form, allowed in SPILLING.items() if form.search(name)), default=0), name


def test_the_compiler_of_pypi_makes_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a driver and without a toolkit: compiled for every GPU, and linked."""
    compilers = BUILDER["FINDER"]["_compilers"]
    of_pypi = [compiler for compiler in compilers() if compiler.origin == "PyPI's packages"]
    assert of_pypi, "make test-slow installs them: the extra nvcc"
    monkeypatch.setitem(compilers.__globals__, "_compilers", lambda: of_pypi)
    BUILDER["build"](["fetch_chunks"], tmp_path / "libraries", tmp_path / "work")
    built = tmp_path / "libraries/fetch_chunks.so"
    assert json.loads((built.parent / "built.json").read_text())["nvcc"] == of_pypi[0].version
    try:
        torch.ops.load_library(str(built))
    except OSError as error:  # a torch without CUDA has no streams; the libraries that it needs are found
        assert torch.version.cuda is None and "undefined symbol: aoti_torch_get_current_cuda_stream" in str(
            error.__cause__
        )
