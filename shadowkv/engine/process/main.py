"""The main module of an engine's process: loads the engine, serves it, and ends with the process that started it.

``launch.py`` starts it as ``python -m shadowkv.engine.process.main FD``, where FD is the file descriptor of the socket
to the starting process.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import NoReturn, Protocol

import zmq

from shadowkv.command_line import one_line
from shadowkv.engine.child_process import ignore_stop_signals
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.held_folder import remove_folder
from shadowkv.engine.process.core import EngineCore
from shadowkv.engine.process.facts import EngineFacts, Launch, Left, NotStarted, run_script
from shadowkv.engine.request import EngineDead
from shadowkv.log_format import set_up_log
from shadowkv.wording import OutOfMemory, SettingsError

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""Seconds between two checks whether an engine of this process has ended."""

ORPHAN_SECONDS = 5.0
"""Time limit in seconds for the last step after the starting process has ended, and for the shutdown of an engine that
has died."""

EXIT_SECONDS = 0.5
"""Time limit in seconds for remaining threads after everything is closed."""

OWN_CACHE = ("kv_dense_below", "kv_offload_gib", "kv_disk_dir", "kv_disk_gib", "role", "host_memory_gib")
"""Settings that apply only to the served engine, not to the one that it is compared with."""


class Core(Protocol):
    """A running engine. ``EngineCore`` is one; tests have others."""

    @property
    def facts(self) -> EngineFacts:
        """Facts about the engine that its clients need."""

    @property
    def is_alive(self) -> bool:
        """Whether the engine still runs."""

    def has_left(self, client: str) -> None:
        """Aborts all requests of a client whose process has ended. Any thread can call it."""

    def shutdown(self) -> None:
        """Ends the engine after the current step."""


def load_cores(launch: Launch) -> list[EngineCore]:
    """Starts the engine of ``launch``, on its own GPUs if it is one of several.

    With ``compare`` it also starts a second engine with that policy on the same weights, for one running and one cached
    sequence. Raises ChildProcessError if a tensor-parallel rank cannot start.
    """
    config = launch.config if launch.replica is None else _with_own_memory(launch.config, *launch.replica)
    from shadowkv.engine.engine import Engine
    from shadowkv.engine.startup.loading import load_for_engine
    from shadowkv.layers.group import RankFailure

    if launch.compare is None:
        try:
            return [_started(EngineCore(Engine(config), launch.folder, "engine"))]
        except RankFailure as error:
            raise ChildProcessError(str(error)) from error
        except OutOfMemory as error:
            if launch.replica is None or config is launch.config:
                raise
            shared = (
                f"{launch.replica[1]} engines share this machine's memory: a lower --data-parallel-size leaves more"
            )
            raise OutOfMemory(f"{error}. {shared} for each", error.settings) from error
    loaded, defaults = load_for_engine(config), {name: getattr(EngineConfig, name) for name in OWN_CACHE}
    # The second engine starts first, because the served one takes all remaining memory of a GPU.
    second = replace(config, **defaults, kv=launch.compare, max_num_seqs=1, max_cached_seqs=1)
    try:
        compared = EngineCore(Engine(second, loaded), launch.folder, "compared")
    except SettingsError as error:
        raise ValueError(error.as_flags({"kv": "--compare"})) from error
    _started(compared)
    return [_started(EngineCore(Engine(config, loaded), launch.folder, "engine")), compared]


def _with_own_memory(config: EngineConfig, replica: int, replicas: int) -> EngineConfig:
    """Returns the config of one of ``replicas`` engines, and hides the GPUs of the others from this process and its
    children: engine 0 has the first ``tensor_parallel_size`` visible ones, and so on. On a CPU an engine has its part
    of the share of free memory that one engine would take. Raises ValueError if there are too few GPUs."""
    import torch

    from shadowkv.engine.startup.sizing import DEFAULT_UTILIZATION

    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.device_count()):
        share = config.gpu_memory_utilization or DEFAULT_UTILIZATION["cpu"]
        return replace(config, gpu_memory_utilization=share / replicas)
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = [str(gpu) for gpu in range(torch.cuda.device_count())] if given is None else given.split(",")
    visible = visible[: torch.cuda.device_count()]  # CUDA ignores those after an invalid one
    each = config.tensor_parallel_size
    if replicas * each > len(visible):
        raise ValueError(
            f"--data-parallel-size {replicas} with --tensor-parallel-size {each} needs {replicas * each} GPUs, and "
            f"this machine has {len(visible)}"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[replica * each : (replica + 1) * each])
    if torch.cuda.device_count() != each:
        raise OSError(f"engine {replica} cannot choose its GPUs, because its process has used CUDA before")
    return config


def _started(core: EngineCore) -> EngineCore:
    core.start()
    return core


def main(descriptor: int, load: Callable[[Launch], Sequence[Core]] = load_cores) -> int:
    """Runs the engines that ``load`` starts, until the starting process stops them or ends, or until an engine ends.
    Returns the exit code. ``load`` can raise what ``load_cores`` raises."""
    ignore_stop_signals()
    set_up_log()
    control = Connection(descriptor)
    try:
        folder = control.recv()  # comes first, so that the folder is removed whatever happens later
    except (OSError, EOFError):
        return 1
    try:
        launch = _received(control)
        return 1 if launch is None else _serve(control, launch, _Parent(control, folder), load)
    finally:
        remove_folder(folder)


def _received(control: Connection) -> Launch | None:
    """Receives the launch order; None if the starting process has ended."""
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
    gc.freeze()  # all current objects stay; without this, a garbage collection takes as long as many steps
    with suppress(OSError):
        control.send([core.facts for core in cores])
    parent.cores = cores
    while not parent.done.wait(POLL_SECONDS) and all(core.is_alive for core in cores):
        pass
    well = all(core.is_alive for core in cores)
    if not well:
        parent.exit_within(ORPHAN_SECONDS)  # the shutdown can hang on a failed device
    for core in cores:
        core.shutdown()
    if parent.is_gone:
        parent.exit()  # no process is left to read the last messages
    zmq.Context.instance().term()  # waits until the last messages are sent
    code = 0 if well else 1
    parent.exit_within(EXIT_SECONDS, code)  # a compilation that still runs cannot be stopped
    return code


class _Parent:
    """Watches the starting process on a thread. When the starting process has ended or has told this one to stop, this
    process gets some seconds to end by itself. If it does not, this object ends it.

    Args:
        control: connection to the starting process.
        folder: folder of the sockets. This process removes it at its exit, because the starting process can be killed
            before it has removed the folder.

    Attributes:
        done: set when the starting process stops this one, or ends.
        is_gone: whether the starting process has ended.
        cores: the engines, which get the names of ended clients; empty before they are ready.
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
        """Ends this process after ``seconds``, unless it ends before."""
        timer = threading.Timer(seconds, self.exit, [code])
        timer.daemon = True
        timer.start()

    def exit(self, code: int = 1) -> NoReturn:
        """Ends this process at once."""
        remove_folder(self._folder)
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
