"""The process of an engine: loads it, serves it, and ends with the process that started it.

``python -m shadowkv.engine.process.main FD``, where FD is the socket to that process (``launch.py``).
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import NoReturn, Protocol

import zmq

from shadowkv.command_line import one_line
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.held_folder import remove_folder
from shadowkv.engine.process.core import EngineCore
from shadowkv.engine.process.facts import EngineFacts, Launch, Left, NotStarted, run_script
from shadowkv.engine.request import EngineDead
from shadowkv.log_format import set_up_log
from shadowkv.wording import SettingsError

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""How long it may take until this process notices that its engine has ended."""

ORPHAN_SECONDS = 5.0
"""How long a step may still take once the process that started this one is gone, and the end of an engine that has
died."""

EXIT_SECONDS = 0.5
"""How long threads may still work once everything is closed."""

OWN_CACHE = ("kv_dense_below", "kv_offload_gib", "kv_disk_dir", "kv_disk_gib", "role", "host_memory_gib")
"""Settings that apply to the served policy's cache and not to one that it is compared with."""


class Core(Protocol):
    """A running engine."""

    @property
    def facts(self) -> EngineFacts:
        """What its clients need to know."""

    @property
    def is_alive(self) -> bool:
        """Whether it steps."""

    def has_left(self, client: str) -> None:
        """Aborts everything that a client has asked for, whose process is gone; may be called from any thread."""

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
        folder = control.recv()  # first: whatever happens from here on, it is removed
    except (OSError, EOFError):
        return 1
    try:
        launch = _received(control)
        return 1 if launch is None else _serve(control, launch, _Parent(control, folder), load)
    finally:
        remove_folder(folder)


def _received(control: Connection) -> Launch | None:
    """What is to be started; None where nobody is left to say so."""
    try:
        if (path := control.recv()) is not None:
            run_script(path)
        launch: Launch = control.recv()
    except (OSError, EOFError):
        return None
    launch.registered.register()
    return launch


def _serve(control: Connection, launch: Launch, parent: _Parent, load: Callable[[Launch], Sequence[Core]]) -> int:
    try:
        cores = load(launch)
    except (ValueError, MemoryError, OSError, EngineDead) as error:
        kinds = (ValueError, MemoryError, OSError)
        kind = next((kind.__name__ for kind in kinds if isinstance(error, kind)), "OSError")
        with suppress(OSError):
            control.send(NotStarted(kind, one_line(error)))
        return 1
    gc.freeze()  # what is there now stays: collections need not look at it, which takes them as long as many steps
    with suppress(OSError):
        control.send([core.facts for core in cores])
    parent.cores = cores
    while not parent.done.wait(POLL_SECONDS) and all(core.is_alive for core in cores):
        pass
    well = all(core.is_alive for core in cores)
    if not well:
        parent.exit_within(ORPHAN_SECONDS)  # a device that has failed may not let go
    for core in cores:
        core.shutdown()
    if parent.is_gone:
        parent.exit()  # nobody is left to read the last messages
    zmq.Context.instance().term()  # once the last messages have left
    code = 0 if well else 1
    parent.exit_within(EXIT_SECONDS, code)  # a compilation cannot be stopped
    return code


class _Parent:
    """The process that started this one, watched on a thread. Once it has done with this one, what does not end by
    itself in time is ended.

    Args:
        folder: for sockets; that process made it, and may be killed before it removes it.

    Attributes:
        done: set when it says that this one is to end, and when it is gone.
        cores: are told which clients are gone; it has none before they are ready.
    """

    def __init__(self, control: Connection, folder: str) -> None:
        self._control, self._folder = control, folder
        self.done, self.is_gone = threading.Event(), False
        self.cores: Sequence[Core] = ()
        threading.Thread(target=self._watch, name="shadowkv-parent", daemon=True).start()

    def _watch(self) -> None:
        try:
            while isinstance(message := self._control.recv(), Left):
                for core in self.cores:
                    core.has_left(message.client)
            seconds: float = message
        except (OSError, EOFError):
            seconds, self.is_gone = ORPHAN_SECONDS, True
        self.done.set()
        self.exit_within(seconds)

    def exit_within(self, seconds: float, code: int = 1) -> None:
        """Ends this process after so many seconds, unless it has ended by then."""
        timer = threading.Timer(seconds, self.exit, [code])
        timer.daemon = True
        timer.start()

    def exit(self, code: int = 1) -> NoReturn:
        """Ends this process at once."""
        remove_folder(self._folder)
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
