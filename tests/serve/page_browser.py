"""Chromium for tests of the page, what they all do with it, and a server that can be killed and started again."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from page_files import log, pdf

ROOT = Path(__file__).resolve().parents[2]
AXE = "axe-core@4.14.1"
RULES = ["wcag2a", "wcag2aa", "wcag21aa", "wcag22aa", "best-practice"]
SHOTS = os.environ.get("PAGE_SCREENSHOTS")
"""A folder that screenshots are written to."""
COLOURS = 224
"""Of a screenshot's palette: text and a few shades, in a small file."""

DESKTOP, PHONE = {"width": 1120, "height": 860}, {"width": 390, "height": 844}
LOOKS = {
    "light": ("light", DESKTOP),
    "dark": ("dark", DESKTOP),
    "phone": ("light", PHONE),
    "dark-phone": ("dark", PHONE),
}
"""In which the page is looked at: colour scheme and size."""


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


@contextmanager
def page_of(browser: Any) -> Iterator[Any]:
    """A page without any past; fails if it had errors, or did something that its policy forbids."""
    context = browser.new_context(viewport=DESKTOP, color_scheme="light", reduced_motion="reduce")
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if "Content Security" in message.text else None)
    yield page
    context.close()
    assert not errors


@functools.cache
def axe() -> str | None:
    """The script of axe-core, from npm; None where it cannot be had."""
    if shutil.which("npm") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(["npm", "pack", AXE], cwd=folder, capture_output=True, text=True, timeout=300)
        if packed.returncode:
            return None
        with tarfile.open(Path(folder) / packed.stdout.split()[-1]) as archive:
            member = archive.extractfile("package/axe.min.js")
            assert member is not None
            return member.read().decode()


def look_at(page: Any, name: str, *looks: str, whole: bool = True) -> None:
    """Nothing is wider than the screen and axe-core finds nothing, in light, dark and on a phone; screenshots of some
    ``looks``, of the whole page or of what is seen at first, where they are asked for."""
    for look, (scheme, size) in LOOKS.items():
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size(size)
        page.locator(f"html[data-theme={scheme}]").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], f"{name}, {look}: too wide"
        if look in looks and SHOTS:
            _shot(page, Path(SHOTS) / f"{name}{'' if look == 'light' else '-' + look}.png", whole)
        if (script := axe()) is not None:
            page.evaluate(script)
            report = page.evaluate("rules => axe.run({runOnly: rules})", RULES)
            found = [(one["id"], [node["html"][:90] for node in one["nodes"]]) for one in report["violations"]]
            assert not found, f"{name}, {look}: {found}"
    page.emulate_media(color_scheme="light")
    page.set_viewport_size(DESKTOP)


def _shot(page: Any, path: Path, whole: bool) -> None:
    from PIL import Image

    page.screenshot(path=path, full_page=whole)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def add(page: Any, name: str = "lighthouse.pdf", content: bytes | None = None) -> None:
    """Adds a document to the next question."""
    content = pdf(log(24)) if content is None else content
    page.set_input_files("#file", {"name": name, "mimeType": "application/octet-stream", "buffer": content})


def paste(page: Any, text: str) -> None:
    """Pastes a text into the question, as from another program."""
    page.focus("#question")
    page.evaluate(
        """text => {
          const data = new DataTransfer();
          data.setData("text/plain", text);
          const event = new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
          const field = document.getElementById("question");
          if (field.dispatchEvent(event)) field.setRangeText(text, field.selectionStart, field.selectionEnd, "end");
        }""",
        text,
    )


def ask(page: Any, question: str) -> None:
    """Asks, as soon as that is possible: once documents are read, and the last answer has ended."""
    from playwright.sync_api import expect

    page.fill("#question", question)
    expect(page.locator("#documents")).not_to_contain_text("is being read")
    expect(page.locator("#send")).to_be_enabled()
    page.press("#question", "Enter")
