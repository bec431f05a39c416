"""Servers of ours that a peer's tests talk to: one for each set of flags, which all tests of a run share."""

from __future__ import annotations

import atexit
import subprocess
import sys
import tempfile
from functools import cache
from typing import IO, Any
from urllib.parse import urlsplit

from shadowkv.models.sources import HUB, resolve_tokenizer

MODEL = "smollm2-135m-64k-chat"


class Live:
    """A running server.

    Args:
        flags: of ``shadowkv serve``, besides the model.

    Raises RuntimeError if it does not start, with its log.
    """

    def __init__(self, flags: tuple[str, ...]) -> None:
        command = [sys.executable, "-m", "shadowkv.serve", "--model", MODEL, "--port", "0", *flags]
        self.log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        assert self.process.stdout is not None
        ready = next((line for line in self.process.stdout if line.startswith("ready: ")), None)
        if ready is None:
            self.log.seek(0)
            raise RuntimeError(f"{self.log.read()[-4000:]}: {' '.join(command)} did not start")
        self.url = ready.split()[1].removesuffix("/v1")
        """``unix:FILE`` with ``--uds``."""

    @property
    def port(self) -> int | None:
        return urlsplit(self.url).port

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


@cache
def transformers_tokenizer() -> Any:
    """The model's tokenizer as Transformers has it, which is what peers' tests compare with."""
    from transformers import AutoTokenizer

    file = resolve_tokenizer(MODEL, HUB)
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


class Servers:
    """All that run, by their flags; they end with the process. ``most`` of them at a time: memory is what they take."""

    def __init__(self, most: int = 2) -> None:
        self.most = most
        self.running: dict[tuple[str, ...], Live] = {}
        atexit.register(self.stop)

    def get(self, flags: tuple[str, ...], anew: bool = False) -> Live:
        """The server with these flags, started if need be in place of the one that was used longest ago; or started
        ``anew``."""
        live = self.running.pop(flags, None)
        if live is not None and anew:
            live.stop()
        if live is None or live.process.poll() is not None:
            while len(self.running) >= self.most:
                self.running.pop(next(iter(self.running))).stop()
            live = Live(flags)
        self.running[flags] = live
        return live

    def stop(self) -> None:
        while self.running:
            self.running.popitem()[1].stop()
