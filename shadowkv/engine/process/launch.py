"""``EngineProcess``: starts an engine's process and watches it. It is used by the HTTP server, and by batches that run
on Ray. ``ReplicaProcesses`` does the same with several engines of one model."""

from __future__ import annotations

import builtins
import logging
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from shadowkv.engine.child_process import GRACE_SECONDS, ending, start_process
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.held_folder import HeldFolder
from shadowkv.engine.process.prefix_table import PrefixTable

if TYPE_CHECKING:
    from shadowkv.engine.process.client import EngineClient
    from shadowkv.engine.process.facts import EngineFacts
    from shadowkv.models.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

ENGINE_MODULE = "shadowkv.engine.process.main"


class EngineProcess:
    """The process of one or two engines. It ends when this process ends, even if this process is killed. The
    constructor does not wait for the model to load.

    Args:
        compare: policy of a second engine on the same weights, for comparisons.
        replica: number of the engine among several on this machine, and their count; None if it is the only one.
        module: the module that the process runs. The process's command line has the descriptor of the socket to this
            process.

    Attributes:
        folder: folder of the engines' sockets, which only this user can enter.
    """

    def __init__(
        self,
        config: EngineConfig,
        compare: str | None = None,
        module: str = ENGINE_MODULE,
        replica: tuple[int, int] | None = None,
    ) -> None:
        self._config, self._ended, self._stopping = config, Future[str](), False
        self._name = "the engine" if replica is None else f"engine {replica[0]}"
        self._facts: list[EngineFacts] = []
        self._clients: list[EngineClient] = []
        # This process removes the folder at its end. If this process is killed, the engine's process removes it.
        self._folder = HeldFolder()
        self.folder = self._folder.path
        self._process, self._control = start_process(module, holds=[self._folder])
        with ExitStack() as failing:
            failing.callback(self.stop, 0.0)
            with suppress(OSError):  # the process has ended; _answer reports why
                self._control.send(self.folder)
            # This import is slow, because it imports PyTorch. It comes here because the engine's process imports
            # PyTorch at the same time.
            from shadowkv.engine.process.facts import Launch, script

            with suppress(OSError):
                self._control.send(script())
                self._control.send(Launch(config, compare, self.folder, replica))
            failing.pop_all()

    @property
    def facts(self) -> list[EngineFacts]:
        """Facts of the engines, the served one first. Waits and raises as ``clients`` does."""
        self.wait()
        return self._facts

    @property
    def clients(self) -> list[EngineClient]:
        """Clients of the engines, the served one first. Waits until the engines serve.

        Raises ValueError, MemoryError or OSError if loading the model fails, ChildProcessError if the process ends
        without a reason.
        """
        self.wait()
        return self._clients

    def wait(self, tokenizer: Tokenizer | None = None) -> None:
        """Waits until the engines serve. ``tokenizer`` is the model's, if it is already loaded. Raises what ``clients``
        raises."""
        if self._clients:
            return
        with ExitStack() as failing:
            failing.callback(self.stop, 0.0)
            from shadowkv.engine.process.client import EngineClient
            from shadowkv.engine.startup.loading import tokenizer_from_config

            if tokenizer is None:
                tokenizer = tokenizer_from_config(self._config)
                tokenizer.chat_encoder.prepare()  # takes a second, which would delay the first request
            self._facts = self._answer()
            self._clients = [EngineClient(facts, tokenizer, self.folder, title=self._name) for facts in self._facts]
            failing.pop_all()
        for client in self._clients:
            self.when_it_ends(client.has_ended)
        threading.Thread(target=self._watch, name="shadowkv-engine-process", daemon=True).start()

    def _answer(self) -> list[EngineFacts]:
        from shadowkv.engine.process.facts import NotStarted

        answer: Any = None
        with suppress(OSError, EOFError):
            answer = self._control.recv()
        if answer is None:
            raise ChildProcessError(f"the process of {self._name} has not started: {ending(self._process)}")
        if isinstance(answer, NotStarted):
            raise getattr(builtins, answer.kind)(answer.message)
        facts: list[EngineFacts] = answer
        return facts

    def stop(self, seconds: float) -> None:
        """Ends the process after the current step, which has ``seconds`` to end. If the process is still running after
        ``seconds + GRACE_SECONDS``, it is killed. If the engines do not serve yet, or if one is stuck, it is killed at
        once. Requests in flight get EngineStopped. A second call does nothing."""
        heeds = bool(self._clients) and all(client.state != "stuck" for client in self._clients)
        self._stopping = True
        for client in self._clients:
            client.stopping = True
        with suppress(OSError):
            self._control.send(seconds)
        try:
            self._process.wait(seconds + GRACE_SECONDS if heeds else 0.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._control.close()
        self._folder.remove()

    def has_left(self, client: str) -> None:
        """Tells the engines that the process of this client has ended, so that they abort its requests."""
        from shadowkv.engine.process.facts import Left

        with suppress(OSError):
            self._control.send(Left(client))

    def when_it_ends(self, callback: Callable[[str], object]) -> None:
        """Registers a callback. It is called with the reason when the process has ended, on any thread."""
        self._ended.add_done_callback(lambda ended: callback(ended.result()))

    def _watch(self) -> None:
        self._process.wait()
        reason = f"{self._name} has died: its process has ended ({ending(self._process)})"
        if not self._stopping:
            logger.error("%s", reason)
        self._ended.set_result(reason)


class ReplicaProcesses:
    """The processes of several engines of one model, each with its own GPUs, behind one client (``ReplicaClient``).
    They end when this process ends. The constructor does not wait for the models to load.

    Args:
        count: number of engines.
        table: as for ``ReplicaClient``.
    """

    def __init__(self, config: EngineConfig, count: int, table: Callable[[int], PrefixTable] = PrefixTable) -> None:
        self._table = table
        self._processes: list[EngineProcess] = []
        self._clients: list[EngineClient] = []
        with ExitStack() as failing:
            failing.callback(self.stop, 0.0)
            for replica in range(count):
                self._processes.append(EngineProcess(config, replica=(replica, count)))
            failing.pop_all()

    @property
    def clients(self) -> list[EngineClient]:
        """The client of all engines. Waits until all serve. If one does not start, stops the others, and raises what
        ``EngineProcess.clients`` raises."""
        if not self._clients:
            with ExitStack() as failing:
                failing.callback(self.stop, 0.0)
                tokenizer = self._processes[0].clients[0].tokenizer
                for process in self._processes[1:]:
                    process.wait(tokenizer)
                failing.pop_all()
            from shadowkv.engine.process.replicas import ReplicaClient

            self._clients = [ReplicaClient([process.clients[0] for process in self._processes], self._table)]
        return self._clients

    def stop(self, seconds: float) -> None:
        """Stops all processes at once, as ``EngineProcess.stop`` does."""
        with ThreadPoolExecutor(len(self._processes) or 1) as threads:
            list(threads.map(lambda process: process.stop(seconds), self._processes))

    def when_it_ends(self, callback: Callable[[str], object]) -> None:
        """Registers a callback. It is called with the reason when the last process has ended, on any thread."""
        running, lock = set(range(len(self._processes))), threading.Lock()

        def end(replica: int, reason: str) -> None:
            with lock:
                running.discard(replica)
                is_last = not running
            if is_last:
                callback(reason)

        for replica, process in enumerate(self._processes):
            process.when_it_ends(partial(end, replica))
