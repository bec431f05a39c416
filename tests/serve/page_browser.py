"""Chromium for tests of the page, and a server that can be killed and started again."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
AXE = "axe-core@4.14.1"
SHOTS = os.environ.get("PAGE_SCREENSHOTS")
"""A folder that screenshots are written to."""


class Server:
    """A server of the small model in a process of its own, always on the same port."""

    def __init__(self, *flags: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._flags = flags
        self.start()

    def start(self) -> None:
        """Returns once it is ready."""
        command = [sys.executable, "-m", "shadowkv.serve", f"--port={self.port}", "--batch=4", *self._flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
        assert self._process.stdout is not None
        assert any(line.startswith("ready: ") for line in self._process.stdout), "the server did not start"

    def kill(self) -> None:
        """Ends it at once."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; raises RuntimeError where there is none."""
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as playwright:
        try:
            own = shutil.which("chromium") or shutil.which("google-chrome")
            browser = playwright.chromium.launch(executable_path=own, args=["--no-sandbox"])
        except Error as error:
            raise RuntimeError(f"no Chromium: {error}") from error
        yield browser
        browser.close()


def axe(folder: Path) -> str | None:
    """The script of axe-core, from npm; None where it cannot be had."""
    if shutil.which("npm") is None:
        return None
    packed = subprocess.run(["npm", "pack", AXE], cwd=folder, capture_output=True, text=True, timeout=300)
    if packed.returncode:
        return None
    with tarfile.open(folder / packed.stdout.split()[-1]) as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()


def shot(page: Any, name: str, **options: Any) -> None:
    """A screenshot, where they are asked for."""
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/{name}.png", **options)
