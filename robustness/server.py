"""A soak's own server, with the tiny model, in a process that must end when told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from robustness.tiny_model import ENGINE, tiny_model

SLOTS = 16
SERVER = {**ENGINE, "max_model_len": 4096, "max_num_seqs": SLOTS, "max_cached_seqs": 0, "max_queued_seqs": 8}
"""It keeps finished sequences only in free slots."""
TIMEOUTS = {"client_header_timeout": 2, "client_body_timeout": 2, "send_timeout": 1}
"""Seconds; shorter than hostile clients hold a connection."""
STOP_SECONDS = 60


def start_server(values: dict[str, Any]) -> tuple[subprocess.Popen[str], str]:
    """A server with these flags that is ready, and its URL; raises SystemExit if it does not start."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    command = [sys.executable, "-m", "shadowkv.serve", "--port=0", *flags]
    # Tiny tensors gain nothing from a second thread. In a separate session: Ctrl-C is for this process.
    options: dict[str, Any] = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "start_new_session": True}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
    assert process.stdout is not None
    try:
        ready = next((line for line in process.stdout if line.startswith("ready: ")), None)
    except BaseException:
        process.kill()
        raise
    if ready is None:
        process.wait()
        raise SystemExit("the server did not start")
    return process, ready.split()[1].removesuffix("/v1")


def stop_server(process: subprocess.Popen[str]) -> None:
    """Tells a server to end; raises SystemExit if it does not end properly."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.returncode != 128 + signal.SIGTERM:
        raise SystemExit(f"the server ended with {process.returncode}")


@contextmanager
def own_server(kv: str, max_body_mib: float) -> Iterator[str]:
    """URL of a server with the tiny model, that policy and bodies up to that length; it must end when told to."""
    with tiny_model() as folder:
        process, url = start_server({"model": folder, **SERVER, "kv": kv, **TIMEOUTS, "max_body_mib": max_body_mib})
        with process:
            try:
                yield url
            finally:
                stop_server(process)
