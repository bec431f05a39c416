"""What the commands that serve start with: their flags, signals, a bound socket, and engines."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from shadowkv.engine.config import EngineConfig, policy_name
from shadowkv.serve.log import set_up_log
from shadowkv.serve.open_files import allow_open_files
from shadowkv.serve.settings import ServerSettings
from shadowkv.wording import SettingsError

if TYPE_CHECKING:
    from shadowkv.engine.async_engine import AsyncEngine

POLICY_FIELDS = ("kv_rank", "kv_budget", "kv_chunk", "kv_outliers", "kv_dense_below") + (
    ("kv_offload_gib", "kv_disk_dir", "kv_disk_gib", "role", "host_memory_gib")
)
"""Settings that apply to the served policy's cache and not to one that it is compared with."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of engines and servers, in groups."""
    EngineConfig.add_arguments(parser)
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    server.add_argument("--port", type=int, default=8000, help="0: any free one (default: %(default)s)")
    server.add_argument("--served-model-name", metavar="NAME", help="the model's name in the API (default: its own)")
    ServerSettings.add_arguments(server)
    text = "a second cache over the same weights, for the page: answers of this policy beside the others, one at a time"
    server.add_argument("--compare", type=policy_name, metavar="POLICY", help=text)


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the process with a one-line error where a flag is not valid; configs and settings check their own."""
    if not 0 <= args.port < 2**16:
        parser.error(f"--port {args.port} must be between 0 and 65535")


def run_until_stopped(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """The exit code of a command that runs until it is done or a signal ends it, with the server's log."""
    set_up_log()
    exit_on_signals()
    try:
        return run(args)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 128 + signal.SIGINT


def exit_on_signals() -> None:
    """Makes SIGTERM end the process like an exit, until a server handles it."""
    signal.signal(signal.SIGTERM, on_terminate)
    # A closing terminal stops it like SIGTERM, unless it was started to outlive the terminal (nohup).
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, on_terminate)


def on_terminate(number: int, frame: object) -> NoReturn:
    """The signal handler."""
    sys.exit(128 + number)


def with_surroundings(settings: ServerSettings, args: argparse.Namespace) -> ServerSettings:
    """The settings, with as many connections as the system allows where no flag sets a number; raises ValueError where
    the environment does not meet a flag's needs."""
    settings.check_surroundings()
    most = allow_open_files(settings.limit_concurrency, or_fewer=args.limit_concurrency is None)
    return replace(settings, limit_concurrency=most)


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the port while the model loads; it does not listen yet, so clients are refused until then."""
    with ExitStack() as stack:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            raise ValueError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
        stack.pop_all()  # bound: the caller closes it
    return listener


def load_engines(config: EngineConfig, compare: str | None) -> list[AsyncEngine]:
    """A running engine and, if there is a policy to compare it with, one with that policy on the same weights, for two
    sequences: a running one and a kept one. Raises ChildProcessError where a tensor-parallel rank cannot start.
    """
    print(f"loading {config.model}", file=sys.stderr, flush=True)
    # Imported here: --help needs no PyTorch, which takes seconds.
    from shadowkv.engine.async_engine import AsyncEngine
    from shadowkv.engine.startup.loading import load_from_config
    from shadowkv.layers.group import RankFailure

    if compare is None:
        try:
            engine = AsyncEngine(config)
        except RankFailure as error:
            raise ChildProcessError(str(error)) from error
        engine.start()
        return [engine]
    loaded = load_from_config(config)
    own = {name: getattr(EngineConfig, name) for name in POLICY_FIELDS}
    # First, since the other takes the remaining memory of a GPU.
    try:
        compared = AsyncEngine(replace(config, **own, kv=compare, max_num_seqs=1, max_cached_seqs=1), loaded)
    except SettingsError as error:
        raise ValueError(error.as_flags({"kv": "--compare"})) from error
    compared.start()
    engine = AsyncEngine(config, loaded)
    engine.start()
    return [engine, compared]
