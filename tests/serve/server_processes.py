"""A server's processes, to be killed and looked at."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil

SECONDS = 300
RUNNING = 4
BODY = {"prompt": "Once upon a time", "max_tokens": 2000, "temperature": 0, "ignore_eos": True}

STOPPING = ("server_stopping", "the server is stopping")
"""Code and message of the error of requests that a stopping server ends."""


@dataclass
class Server:
    """A running server: its processes, the first one for HTTP, and the folder of all its temporary files."""

    http: subprocess.Popen[str]
    engine: psutil.Process
    workers: list[psutil.Process]
    url: str
    folder: Path
    log: Path

    def ask(self, stream: bool = False, **more: object) -> tuple[httpx.Response, float]:
        """The answer to a long request, and when it came."""
        answer = httpx.post(f"{self.url}/v1/completions", json={**BODY, "stream": stream, **more}, timeout=SECONDS)
        return answer, time.monotonic()

    def health(self) -> int:
        return httpx.get(f"{self.url}/health", timeout=SECONDS).status_code

    def gauge(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics", timeout=SECONDS).text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"shadowkv:{name}{{"))

    def assert_nothing_is_left(self, family: list[psutil.Process]) -> None:
        assert not [process for process in family if not is_gone(process)]
        assert not list(self.folder.iterdir())

    def open_folders(self) -> set[Path]:
        """Folders of temporary files that one of its processes has a file open in."""
        opened = [Path(file.path) for process in self.family() for file in process.open_files()]
        return {self.folder / path.relative_to(self.folder).parts[0] for path in opened if self.folder in path.parents}

    def family(self) -> list[psutil.Process]:
        """All its processes."""
        process = psutil.Process(self.http.pid)
        return [process, *process.children(recursive=True)]


def is_gone(process: psutil.Process) -> bool:
    """Whether it has ended, though nobody may have asked how."""
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


@contextmanager
def server(model: Path, *flags: str, temporary: Path | None = None) -> Iterator[Server]:
    """Serves weights that are drawn, ``RUNNING`` sequences at a time unless told otherwise; with temporary files in a
    folder of its own, or in another's."""
    command = [sys.executable, "-m", "shadowkv.serve", "--port=0", f"--model={model}", "--load-format=dummy"]
    command += ["--device=cpu", "--kv=full", f"--max-num-seqs={RUNNING}", *flags]
    with TemporaryDirectory(prefix="two-") as own:  # a short path: those of sockets are
        folder, log = temporary or Path(own) / "tmp", Path(own) / "log"
        folder.mkdir(exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        with (
            log.open("w") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
        ):
            children: list[psutil.Process] = []
            try:
                assert process.stdout is not None
                ready = next((line for line in process.stdout if line.startswith("ready: ")), None)
                assert ready is not None, log.read_text()
                children = psutil.Process(process.pid).children()
                engine, *workers = children  # in the order of their start
                assert "shadowkv.engine.process.main" in engine.cmdline()
                assert all(path.name.startswith("shadowkv-") for path in folder.iterdir())
                yield Server(process, engine, workers, ready.split()[1].removesuffix("/v1"), folder, log)
            finally:
                for one in (*children, process):
                    with suppress(psutil.NoSuchProcess):
                        one.kill()
