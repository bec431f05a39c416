"""Feeds the targets of fuzz_files.py by coverage: libFuzzer keeps what reaches new code, and mutates that.

Python code of the engine, jinja2 and gguf is instrumented by the atheris library; native code is not. Each target runs
in a separate process, starts from its valid files, and has a dictionary of pieces. Bytes that cause a fault are saved.

    python -m robustness.fuzz_guided --seconds 20 --out benchmarks/results/cpu/fuzz_guided.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from shadowkv.installation import adding

try:
    import atheris
except ImportError:
    sys.exit(f"fuzz_guided.py: the atheris library is missing: {adding('fuzz')}")
with atheris.instrument_imports(include=["shadowkv", "jinja2", "gguf"]):
    from robustness import fuzz_files

from shadowkv.eval.provenance import provenance


def guide(name: str, seconds: int, faults: Path, folder: Path) -> None:
    """Fuzzes the target ``name`` and ends the process; ``folder / "log"`` has the outcome."""
    corpus, words = folder / "corpus", folder / "words"
    os.dup2(os.open(folder / "log", os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    fuzz_files.confine()
    corpus.mkdir()
    tempfile.tempdir = str(folder)  # libFuzzer ends the process with exit(); the parent removes what is left
    seen: set[str] = set()
    with fuzz_files.all_targets() as targets:
        target = targets[name]

        def one(raw: bytes) -> None:
            fault = target.fault(raw)
            if fault and fault not in seen and len(seen) < fuzz_files.MAX_FAULTS:
                seen.add(fault)
                path = faults / f"{name}-{hashlib.sha1(raw).hexdigest()}"
                path.write_bytes(raw)
                print(f"\nfault: {path}: {fault!r}", file=sys.stderr, flush=True)

        for index, seed in enumerate(target.seeds):
            (corpus / str(index)).write_bytes(seed)
        pieces = [piece.encode("utf-8", "surrogatepass") for piece in fuzz_files.PIECES]
        escaped = ["".join(f"\\x{byte:02x}" for byte in piece) for piece in pieces if len(piece) <= 64]
        words.write_text("".join(f'"{text}"\n' for text in escaped))
        limits = [f"-max_total_time={seconds}", f"-timeout={fuzz_files.CASE_SECONDS}", "-rss_limit_mb=0"]
        places = [f"-dict={words}", f"-artifact_prefix={faults / name}-", str(corpus)]
        atheris.Setup([name, *limits, "-print_final_stats=1", *places], one)
        atheris.Fuzz()


def figures(log: str, status: int | None) -> dict[str, Any]:
    """Figures in a log: cases, edges and features of coverage, cases that reached new code, faults."""
    runs = [int(count) for count in re.findall(r"^stat::number_of_executed_units: (\d+)$", log, re.M)]
    reached = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", log) or [(0, 0, 0)]
    faults = re.findall(r"^fault: (.*)$", log, re.M) + re.findall(r"Test unit written to (.*)$", log, re.M)
    if status or not runs:
        faults.append(f"the process ended with status {status}: {log[-1000:]}")
    (edges, features, _), (last_edges, last_features, kept) = (tuple(map(int, reached[at])) for at in (0, -1))
    good, end = {"edges": edges, "features": features}, {"edges": last_edges, "features": last_features}
    return {"runs": sum(runs), "good files": good, "in the end": end, "kept": kept, "faults": faults}


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=20, help="of each target (default: %(default)s)")
    parser.add_argument("--targets", nargs="+", metavar="NAME", help="only these (default: all)")
    parser.add_argument("--faults", type=Path, default=Path("build/faults"), metavar="DIR", help="bytes to keep")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the summary there, as JSON")
    args = parser.parse_args(argv)
    args.faults.mkdir(parents=True, exist_ok=True)
    with fuzz_files.all_targets() as targets:
        names = list(targets)
    if unknown := set(args.targets or ()) - set(names):
        parser.error(f"--targets {' '.join(unknown)}: it must be among {' '.join(names)}")
    summary = {}
    for name in args.targets or names:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            given = (name, args.seconds, args.faults, Path(folder))
            process = multiprocessing.get_context("fork").Process(target=guide, args=given)
            process.start()
            process.join()
            summary[name] = figures(Path(folder, "log").read_text(errors="replace"), process.exitcode)
        print(name, json.dumps(summary[name]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(provenance() | {"targets": summary}, indent=1) + "\n", encoding="utf-8")
    return 1 if any(one["faults"] for one in summary.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
