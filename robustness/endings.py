"""Ends servers in many ways: are signals heeded, are clients and supervisors told, is anything left?

- While a server loads it gets SIGINT or SIGTERM, at moments spread over its start: it must end, and leave no process,
  no temporary folder and no shared memory.
- Under load its engine is killed (SIGKILL): every request must end with the error that says so, the log must say it
  once, the command must end with its status for that, and nothing may be left.
- All its processes are killed: the next start on the same machine must remove what they left, and nothing of a server
  that lives.

    python -m robustness.endings --moments 100 --kills 10 --out results/endings.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil

from robustness.live_server import kill_server, start_server, stop_server
from shadowkv.engine.config import DEFAULT_MODEL
from shadowkv.eval.provenance import provenance
from shadowkv.eval.records.predictions import write_json
from shadowkv.serve.process import ENGINE_DIED

HEEDED_SECONDS = 30.0
"""Within which a server that loads must have ended after a signal: otherwise that was lost."""

GONE_SECONDS = 10.0
"""Within which everything else of a server must be gone once its first process is."""

ANSWER_SECONDS = 120.0
REQUESTS = 8
SIGNALS = (signal.SIGINT, signal.SIGTERM)
COUNTS = (1, 2)
"""Processes for HTTP, in turns."""

COMMAND = "import sys; from shadowkv.cli import main; sys.exit(main())"
"""As the installed ``shadowkv`` does."""


@dataclass
class Endings:
    """All runs, and what came of them."""

    args: argparse.Namespace
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def fault(self, text: str) -> None:
        """Records a fault."""
        self.faults.append(text[:500])
        print(self.faults[-1], file=sys.stderr, flush=True)

    def flags(self, processes: int) -> dict[str, Any]:
        """Flags of a server."""
        args = self.args
        flags = {"model": args.model, "load_format": args.load_format, "device": args.device, "kv": "full"}
        return flags | {"max_num_seqs": 4, "max_model_len": 2048, "api_server_count": processes}

    def took(self, what: str, seconds: float) -> None:
        """Notes how long something took."""
        self.seconds.setdefault(what, []).append(seconds)

    # -- signals while it loads --------------------------------------------------------------------------------------

    def signals(self) -> None:
        """Signals to servers that load, at moments spread over the time that a start takes."""
        longest = {processes: self._start_seconds(processes) for processes in COUNTS}
        for number in range(self.args.moments):
            processes, sent = COUNTS[number % 2], SIGNALS[number // 2 % 2]
            moment = longest[processes] * (number + 1) / self.args.moments
            with self._workplace(f"{sent.name} after {moment:.2f} s, {processes} for HTTP") as (folder, where):
                self._signal(processes, sent, moment, folder, where)

    def _start_seconds(self, processes: int) -> float:
        with TemporaryDirectory(prefix="endings-") as folder:
            begin = time.monotonic()
            process, _ = start_server(self.flags(processes), Path(folder))
            seconds = time.monotonic() - begin
            with process:
                stop_server(process)
        self.took(f"a start, {processes} for HTTP", seconds)
        return seconds

    def _signal(self, processes: int, sent: signal.Signals, moment: float, folder: Path, where: str) -> None:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in self.flags(processes).items()]
        command = [sys.executable, "-c", COMMAND, "serve", "--port=0", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        options: dict[str, Any] = {"env": environment, "start_new_session": True}
        with (folder.parent / "log").open("w") as log:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, **options)
        with process:
            time.sleep(moment)
            family = family_of(process.pid)
            process.send_signal(sent)
            begin = time.monotonic()
            try:
                status = process.wait(HEEDED_SECONDS)
            except subprocess.TimeoutExpired:
                self.counts["signals lost"] += 1
                self.fault(f"{where}: it goes on")
                kill_server(process)
                return
        self.counts["signals"] += 1
        self.took("from a signal to the end", time.monotonic() - begin)
        if status not in (128 + sent, -sent):  # the latter before the command handles signals
            self.fault(f"{where}: exit status {status}: {(folder.parent / 'log').read_text()[-300:]}")
        self._check_gone(family, where)

    # -- engines that are killed -------------------------------------------------------------------------------------

    def engines(self) -> None:
        """Engines that are killed while they answer."""
        for number in range(self.args.kills):
            processes = COUNTS[number % 2]
            with self._workplace(f"engine {number}, {processes} for HTTP") as (folder, where):
                with (folder.parent / "log").open("w") as log:
                    process, url = start_server(self.flags(processes), folder, log)
                family = family_of(process.pid)
                with process, ThreadPoolExecutor(REQUESTS) as clients:
                    answers = [clients.submit(ending_of, url, number % 2 == 0) for number in range(REQUESTS)]
                    wait_for_requests(url)
                    engine_of(process).kill()
                    begin = time.monotonic()
                    for answer in answers:
                        self._judge_answer(where, answer.result())
                    status = self._status(process, where)
                    self.took("from the engine's kill to the end", time.monotonic() - begin)
                self.counts["engines killed"] += 1
                log_lines = (folder.parent / "log").read_text().splitlines()
                told = [line for line in log_lines if "the engine has died" in line and "(SIGKILL" in line]
                if status != ENGINE_DIED or len(told) != 1 or any("Traceback" in line for line in log_lines):
                    self.fault(f"{where}: exit status {status}, log {log_lines[-5:]}")
                self._check_gone(family, where)

    def _judge_answer(self, where: str, code: str) -> None:
        self.counts["requests in flight"] += 1
        if code == "engine_dead":
            self.counts["told so"] += 1
        else:
            self.fault(f"{where}: a request ended with {code}")

    def _status(self, process: subprocess.Popen[str], where: str) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(HEEDED_SECONDS)
        kill_server(process)
        self.fault(f"{where}: the server goes on without its engine")
        return None

    # -- servers that are killed -------------------------------------------------------------------------------------

    def servers(self) -> None:
        """Servers all of whose processes are killed, beside one that lives, and the next ones."""
        for number in range(self.args.kills):
            processes = COUNTS[number % 2]
            with self._workplace(f"server {number}, {processes} for HTTP") as (folder, where):
                living, url = start_server(self.flags(1), folder)
                with living:
                    held = set(folder.iterdir())
                    killed, _ = start_server(self.flags(processes), folder)
                    with killed:
                        left = set(folder.iterdir()) - held
                        engine_of(killed).suspend()  # it would tidy up
                        kill_server(killed)
                    left &= set(folder.iterdir())
                    self.counts.update({"servers killed": 1, "folders they left": len(left)})
                    after, _ = start_server(self.flags(1), folder)
                    with after:
                        there = set(folder.iterdir())
                        self.counts["of these there after the next start"] += len(left & there)
                        if not left or left & there or not held <= there or ending_of(url, False, 2) != "none":
                            self.fault(f"{where}: left {left}, held {held}, there {there}")
                        stop_server(after)
                    stop_server(living)

    # -- what is left ------------------------------------------------------------------------------------------------

    @contextmanager
    def _workplace(self, where: str) -> Iterator[tuple[Path, str]]:
        """A folder for temporary files that must be empty in the end, with no shared memory left beside it."""
        before = unused_memory()
        with TemporaryDirectory(prefix="endings-") as own:
            (folder := Path(own) / "tmp").mkdir()
            yield folder, where
            if left := [path.name for path in folder.iterdir()]:
                self.counts["left a folder"] += 1
                self.fault(f"{where}: left {left}")
        if memory := unused_memory() - before:
            self.counts["left shared memory"] += 1
            self.fault(f"{where}: left {memory}")

    def _check_gone(self, family: list[psutil.Process], where: str) -> None:
        _, alive = psutil.wait_procs(family, GONE_SECONDS)
        if alive:
            self.counts["left a process"] += 1
            self.fault(f"{where}: left {alive}")
            for process in alive:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def summary(self) -> dict[str, Any]:
        """All figures, and whether the run passed."""
        names = ("signals", "signals lost", "engines killed", "requests in flight", "told so", "servers killed")
        names += ("folders they left", "of these there after the next start")
        names += ("left a folder", "left a process", "left shared memory")
        spans = {f"{what}, s": (statistics.median(took), max(took)) for what, took in self.seconds.items()}
        return {
            "ok": not self.faults,
            **{name: self.counts[name] for name in names},
            **{name: {"median": round(median, 2), "most": round(most, 2)} for name, (median, most) in spans.items()},
            "faults": self.faults,
        }


def family_of(pid: int) -> list[psutil.Process]:
    """A process and all that it has started."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def engine_of(server: subprocess.Popen[str]) -> psutil.Process:
    """The engine's process of a server."""
    children = psutil.Process(server.pid).children()
    return next(child for child in children if "shadowkv.engine.process.main" in child.cmdline())


def ending_of(url: str, stream: bool, tokens: int = 2000) -> str:
    """Asks for so many tokens; returns the code of the error that the answer ended with, or "none"."""
    body = {"prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": stream}
    try:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=ANSWER_SECONDS)
    except httpx.HTTPError as error:
        return type(error).__name__
    parts = [line.removeprefix("data: ") for line in answer.text.splitlines() if line and line != "data: [DONE]"]
    error = json.loads(parts[-1] if stream and answer.status_code == 200 else answer.text).get("error")
    return "none" if error is None else str(error["code"])


def wait_for_requests(url: str) -> None:
    """Until all requests have come to the engine."""
    end = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < end:
        lines = httpx.get(f"{url}/metrics", timeout=ANSWER_SECONDS).text.splitlines()
        names = ("shadowkv:num_requests_running{", "shadowkv:num_requests_waiting{")
        if sum(float(line.split()[-1]) for line in lines if line.startswith(names)) >= REQUESTS:
            return
        time.sleep(0.02)
    raise SystemExit("the requests were not begun")


def unused_memory() -> set[str]:
    """Shared memory that no process has."""
    used = set[str]()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            used |= {Path(one.path).name for one in process.memory_maps() if one.path.startswith("/dev/shm/")}
            used |= {Path(one.path).name for one in process.open_files() if one.path.startswith("/dev/shm/")}
    return {path.name for path in Path("/dev/shm").iterdir()} - used


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="(default: %(default)s)")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"), help="(default: %(default)s)")
    parser.add_argument("--device", default="auto", help="(default: %(default)s)")
    parser.add_argument("--moments", type=int, default=100, help="of signals in a start (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=10, help="of engines, and of servers (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the summary there, as JSON")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs it; returns 1 if anything failed."""
    args = parse(argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also if it was started in the background
    endings = Endings(args)
    for part in (endings.signals, endings.engines, endings.servers):
        part()
        print(json.dumps(endings.summary()), file=sys.stderr, flush=True)
    summary = endings.summary()
    print(json.dumps(summary, indent=2))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.out, {**provenance(), **summary})
    return 0 if summary["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
