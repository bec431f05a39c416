"""The process of an engine: loads it, serves it, and ends with the process that started it.

``python -m shadowkv.engine.process.main FD``, where FD is the socket to that process (``launch.py``).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Protocol

import zmq

from shadowkv.command_line import one_line
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.process.core import EngineCore
from shadowkv.engine.process.facts import EngineFacts, Launch, NotStarted
from shadowkv.engine.request import EngineDead
from shadowkv.log_format import set_up_log
from shadowkv.wording import SettingsError

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""How long it may take until this process notices that its engine has ended."""

ORPHAN_SECONDS = 5.0
"""How long a step may still take once the process that started this one is gone."""

OWN_CACHE = ("kv_rank", "kv_budget", "kv_chunk", "kv_outliers", "kv_dense_below") + (
    ("kv_offload_gib", "kv_disk_dir", "kv_disk_gib", "role", "host_memory_gib")
)
"""Settings that apply to the served policy's cache and not to one that it is compared with."""


class Core(Protocol):
    """A running engine."""

    @property
    def facts(self) -> EngineFacts:
        """What its clients need to know."""

    @property
    def is_alive(self) -> bool:
        """Whether it steps."""

    def shutdown(self) -> None:
        """Ends it after the current step."""


def load_cores(launch: Launch) -> list[EngineCore]:
    """A running engine and, if there is a policy to compare it with, one with that policy on the same weights, for two
    sequences: a running one and a kept one. Raises ChildProcessError where a tensor-parallel rank cannot start."""
    from shadowkv.engine.engine import Engine
    from shadowkv.engine.startup.loading import load_from_config
    from shadowkv.layers.group import RankFailure

    if launch.compare is None:
        try:
            return [_started(EngineCore(Engine(launch.config), launch.folder, "engine"))]
        except RankFailure as error:
            raise ChildProcessError(str(error)) from error
    loaded, defaults = load_from_config(launch.config), {name: getattr(EngineConfig, name) for name in OWN_CACHE}
    # First, since the other takes the remaining memory of a GPU.
    second = replace(launch.config, **defaults, kv=launch.compare, max_num_seqs=1, max_cached_seqs=1)
    try:
        compared = EngineCore(Engine(second, loaded), launch.folder, "compared")
    except SettingsError as error:
        raise ValueError(error.as_flags({"kv": "--compare"})) from error
    _started(compared)
    return [_started(EngineCore(Engine(launch.config, loaded), launch.folder, "engine")), compared]


def _started(core: EngineCore) -> EngineCore:
    core.start()
    return core


def main(descriptor: int, load: Callable[[Launch], Sequence[Core]] = load_cores) -> int:
    """Runs what ``load`` has started until the other end says so or is gone, or until an engine has ended; returns the
    exit code. ``load`` raises what ``load_cores`` does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to a whole service: the process that started this one sees to it
    set_up_log()
    control = Connection(descriptor)
    try:
        launch: Launch = control.recv()
    except (OSError, EOFError):
        return 1
    orphaned = _watch(control)
    try:
        cores = load(launch)
    except (ValueError, MemoryError, OSError, EngineDead) as error:
        kinds = (ValueError, MemoryError, OSError)
        kind = next((kind.__name__ for kind in kinds if isinstance(error, kind)), "OSError")
        with suppress(OSError):
            control.send(NotStarted(kind, one_line(error)))
        return 1
    with suppress(OSError):
        control.send([core.facts for core in cores])
    while not orphaned.wait(POLL_SECONDS) and all(core.is_alive for core in cores):
        pass
    well = all(core.is_alive for core in cores)
    for core in cores:
        core.shutdown()
    zmq.Context.instance().term()  # once the last messages have left
    return 0 if well else 1


def _watch(control: Connection) -> threading.Event:
    """An event that is set once the other end closes its connection; what does not end by itself then is ended."""
    gone = threading.Event()

    def watch() -> None:
        seconds = ORPHAN_SECONDS
        with suppress(OSError, EOFError):
            seconds = control.recv()
        gone.set()
        timer = threading.Timer(seconds, os._exit, (1,))
        timer.daemon = True
        timer.start()

    threading.Thread(target=watch, name="shadowkv-parent", daemon=True).start()
    return gone


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
