"""What the serving commands need at their start: flags, a bound socket, and engines."""

from __future__ import annotations

import argparse
import fcntl
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from shadowkv.command_line import Parser, add_config_file
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.process.launch import ENGINE_MODULE, EngineProcess, ReplicaProcesses
from shadowkv.engine.process.prefix_table import PrefixTable
from shadowkv.engine.vllm_flags import add_vllm_flags, vllm_notes
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.process import allow_open_files
from shadowkv.settings import add_flags
from shadowkv.wording import GIB

MOST_ON_FEW_CORES = 8
"""Maximum number of engines on a machine of up to as many cores; on others one engine for each core."""


def add_arguments(parser: argparse.ArgumentParser, *own: str) -> None:
    """Adds the model and the flags of engines and servers, in groups. ``own`` are flags of vLLM that the command
    supports."""
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="the same as --model")
    add_config_file(parser)
    EngineConfig.add_arguments(parser)
    add_vllm_flags(parser, *own)
    add_flags(parser, ServerSettings)


def add_batch_files(batch: argparse._ArgumentGroup, required: bool) -> None:
    """Adds the flags of a batch run's files."""
    text = "file of requests in OpenAI's batch format (.jsonl)"
    batch.add_argument("--input", type=Path, required=required, metavar="FILE", help=text)
    batch.add_argument("--output", type=Path, required=required, metavar="FILE", help="file to write the answers to")
    text = "skip requests that already have an answer in --output or in its .partial file"
    batch.add_argument("--resume", action="store_true", help=text)


def parse_arguments(parser: Parser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the flags of a command line and of its config file. Prints a note for each flag that has no effect.
    Invalid flags end the process with a one-line error. Fields of ``EngineConfig`` and ``ServerSettings`` are checked
    later, by these classes."""
    args = parser.parse_with_file(arguments)
    try:
        for note in vllm_notes(args):
            print(f"note: {note}", file=sys.stderr, flush=True)
    except ValueError as error:
        parser.error(str(error))
    return args


def with_surroundings(settings: ServerSettings) -> ServerSettings:
    """Completes the settings with what depends on this machine: the host names that requests may use, and the number of
    connections that the limit of open files allows. Raises ValueError if files or libraries that a flag needs are
    missing, or if ``limit_concurrency`` exceeds the allowed number of connections."""
    settings.check_files_and_libraries()
    connections = allow_open_files(settings.max_connections, or_fewer=settings.limit_concurrency is None)
    return replace(settings.listening(), limit_concurrency=connections)


@contextmanager
def bound_socket(settings: ServerSettings) -> Iterator[socket.socket]:
    """A context with a socket that is bound to the address in the settings. The socket does not listen yet, so that
    clients are refused until the server is ready. Raises ValueError if the address cannot be bound."""
    with bind(settings.host, settings.port) if settings.uds is None else bind_file(settings.uds) as listener:
        yield listener


@contextmanager
def bind_file(file: str | Path) -> Iterator[socket.socket]:
    """A context with a Unix domain socket at ``file``. The file of a killed server is replaced. For the whole
    context, a lock on ``FILE.lock`` keeps other servers from using the same file, even while this server loads its
    model or shuts down and nobody can connect."""
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(open(f"{file}.lock", "w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            if Path(file).is_socket() and not _is_answered(file):  # no other program listens on this socket
                Path(file).unlink()
            listener.bind(str(file))
        except BlockingIOError as error:
            raise ValueError(f"cannot listen on --uds {file}: another server uses it") from error
        except OSError as error:
            raise ValueError(f"cannot listen on --uds {file}: {error.strerror or error}") from error
        stack.callback(Path(file).unlink, missing_ok=True)
        yield listener


def _is_answered(file: str | Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1)  # a server whose queue of connections is full does not answer in time
        try:
            client.connect(str(file))
        except ConnectionRefusedError:
            return False
        except TimeoutError:
            return True
    return True


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the port; raises ValueError if that fails."""
    with ExitStack() as stack:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            raise ValueError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
        stack.pop_all()  # the socket is bound: the caller closes it
    return listener


def start_engine(config: EngineConfig, compare: str | None, module: str = ENGINE_MODULE) -> EngineProcess:
    """Starts the process of an engine. With ``compare``, the process also has a second engine, with that policy and the
    same weights. The second engine has room for two sequences: a running one and a cached one. ``module`` as for
    ``EngineProcess``."""
    print(f"loading {config.model}", file=sys.stderr, flush=True)
    return EngineProcess(config, compare, module)


def start_replicas(
    config: EngineConfig, count: int, table: Callable[[int], PrefixTable] = PrefixTable
) -> ReplicaProcesses:
    """Starts the processes of ``count`` engines of one model, each with its own GPUs. ``table`` as for
    ``ReplicaClient``. Raises ValueError if there are too many for the machine's cores, if all would take the same host
    memory, or if together they would take more than is free."""
    most = max(MOST_ON_FEW_CORES, len(os.sched_getaffinity(0)))
    if count > most:
        raise ValueError(f"--data-parallel-size {count} is more than {most}, the most engines for this machine's cores")
    if config.spec().place == "host" and config.host_memory_gib is None:
        raise ValueError(
            f"--data-parallel-size {count} with --kv {config.kv} needs --host-memory-gib: host memory of each engine"
        )
    _check_host_memory(config, count)
    print(f"loading {config.model} in {count} engines", file=sys.stderr, flush=True)
    return ReplicaProcesses(config, count, table)


def _check_host_memory(config: EngineConfig, count: int) -> None:
    """Raises ValueError if ``count`` engines together would take more host memory than is free. Each engine checks only
    its own."""
    given: dict[str, float | None] = {"--kv-offload-gib": config.kv_offload_gib}
    if config.spec().place == "host":
        given["--host-memory-gib"] = config.host_memory_gib
    taken = {flag: gib for flag, gib in given.items() if gib}
    if not taken:
        return
    from shadowkv.kvcache.memory.free_memory import free_host_bytes

    needed, free = count * sum(taken.values()), free_host_bytes() / GIB
    if needed > free:
        each = " and ".join(f"{flag} {gib:g}" for flag, gib in taken.items())
        raise ValueError(
            f"{count} engines with {each} each need {needed:.2f} GiB of host memory, {free:.2f} GiB is free. Lower "
            f"{' or '.join(taken)}, or --data-parallel-size"
        )
