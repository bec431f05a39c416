"""Runs a server as a process: starts it, waits until it answers, and stops it with all its child processes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

STOP_SECONDS = 30
LAST_LINES = 15
"""Number of lines of the log to show if a server does not start."""


@contextmanager
def running(
    command: Sequence[str], base_url: str, log: Path, environment: Mapping[str, str], timeout: float = 600.0
) -> Iterator[subprocess.Popen[bytes]]:
    """A context in which a server runs. The context begins when the server answers ``base_url``/models, and yields the
    process.

    Args:
        command: the server's command line.
        environment: variables to add to this process's environment.
        timeout: maximum seconds until the server answers.

    The server's output goes to ``log``. Raises RuntimeError with the end of the log if the server ends early or does
    not answer within ``timeout``. Also raises it if another server answers at ``base_url`` already.
    """
    if _answers(base_url):
        raise RuntimeError(f"another server answers {base_url} already")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        output.write(f"$ {shlex.join(command)}\n")
        output.flush()
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait(process, base_url, log, timeout)
            yield process
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            with suppress(ProcessLookupError):  # its child processes could outlive it and keep the GPU's memory
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], base_url: str, log: Path, timeout: float) -> None:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if process.poll() is not None:
            why = f"ended with {process.returncode}"
            break
        if _answers(base_url):
            return
        time.sleep(0.2)
    else:
        why = f"did not answer within {timeout:g} s"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    raise RuntimeError("\n".join([f"the server {why}; the end of {log}:", *lines]))


def _answers(base_url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{base_url}/models", timeout=5).status_code == 200
    return False
