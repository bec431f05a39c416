"""Runs the tests that need a GPU, in processes that share one card, and ends with a summary by file.

``python scripts/gpu_tests.py [pytest's own arguments]``, after ``csrc/build_cuda.py``; ``make test-gpu`` does both. A
test that hangs costs its own time limit and its process, which pytest-xdist replaces.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

from shadowkv.eval.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "tests/engine/test_cuda_*.py",
    "tests/engine/test_backends.py",
    "tests/engine/test_mixed_passes.py",
    "tests/models/test_cuda_*.py",
    "tests/kvcache/test_*.py",
    "tests/ops/test_*.py",
)
"""Longest tests first, so that none is left to run alone."""
FOR_A_GPU = re.compile(r"cuda|^from driver import", re.MULTILINE)
"""What files contain whose tests run on a GPU if there is one; the others run in ``make test`` only."""
ENGINES = tuple(f"tests/{name}_drafts.py" for name in ("engine/test_hybrid", "engine/test_sparse", "models/test_head"))
"""Files of tests whose engines run on a GPU if there is one: steps with several rows of a sequence differ there."""
PROCESSES = min(12, os.cpu_count() or 1)
TEST_SECONDS, ALL_SECONDS = 90, 410
"""Limits; after the second no other test is started. With the build, ten minutes are enough whatever hangs."""
OUTCOMES = ("passed", "failed", "skipped")


def files() -> list[str]:
    """Paths of the test files, from the root."""
    paths = [path for pattern in FOLDERS for path in sorted(ROOT.glob(pattern))]
    named = [str(path.relative_to(ROOT)) for path in paths if FOR_A_GPU.search(path.read_text(encoding="utf-8"))]
    return [*ENGINES, *named]


def run(report: Path, more: list[str]) -> int:
    """Runs pytest, which writes ``report``; returns its exit status, or -1 if it had to be stopped."""
    command = [
        *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--tb=short", "--durations=12"),
        # Tests are distributed one by one.
        *("-n", str(PROCESSES), "--dist=load", "--maxschedchunk=1", f"--junitxml={report}"),
        *(f"--timeout={TEST_SECONDS}", "--timeout-method=thread", f"--session-timeout={ALL_SECONDS}"),
        *(more if any(not word.startswith("-") for word in more) else [*files(), *more]),
    ]
    # Their references' sums on the host are small.
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)
    try:
        return process.wait(ALL_SECONDS + TEST_SECONDS + 15)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # it still writes the report then
        with suppress(subprocess.TimeoutExpired):
            process.wait(15)
        return -1
    finally:
        with suppress(ProcessLookupError):  # what hangs in a kernel outlives its parent
            os.killpg(process.pid, signal.SIGKILL)


def summary(report: Path) -> tuple[list[str], Counter[str]]:
    """A line for each file and each failed test, and the number of tests by outcome."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    seconds: Counter[str] = Counter()
    failures = []
    for case in ElementTree.parse(report).iter("testcase"):
        # A whole file that is skipped has no class name.
        file = (case.get("classname") or case.get("name", "")).replace(".", "/") + ".py"
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[file][outcome] += 1
        seconds[file] += float(case.get("time", 0))
        if outcome == "failed":
            failures.append(f"FAILED {file}::{case.get('name')}")
    lines = []
    for file in sorted(counts):
        numbers = "".join(f"{counts[file][outcome]:6} {outcome}" for outcome in OUTCOMES)
        lines.append(f"{file:46}{numbers}{seconds[file]:8.1f} s")
    return [*lines, *failures], sum(counts.values(), Counter())


def main() -> int:
    """Command line; returns the exit status."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status = run(report, sys.argv[1:])
        lines, counts = summary(report) if report.exists() else (["no report was written"], Counter())
    about = provenance()
    print(f"\n{about['commit']}, {about['gpu']}, PyTorch {about['torch']}, CUDA {about['cuda']}")
    print(*lines, sep="\n")
    totals = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
    ended = "ran to its end" if status in (0, 1) else "did not run to its end"
    print(f"{totals} in {time.monotonic() - start:.0f} s by {PROCESSES} processes; {ended}")
    return 0 if status == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
