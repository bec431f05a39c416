"""``shadowkv ray serve``: one server whose requests are answered by several replicas of an engine, on Ray Serve.

The Ray cluster is one that is already running (``ray start``, or RAY_ADDRESS), or a local one on this machine.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shadowkv.command_line import Parser, one_line
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.process.prefix_table import margin_of
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.process import exit_on_signals, run_until_stopped, stops_repeated
from shadowkv.serve.start import add_arguments, bound_socket, parse_arguments, with_surroundings

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle

APP_NAME = "shadowkv"
"""Name of the Ray Serve application."""

SEEN_TO = ("api_key", "cache_salt_by_key", "max_concurrent_requests_per_key", "allowed_hosts") + (
    ("allowed_origins", "allow_credentials", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs")
)
"""Settings that the front handles, and replicas do not have."""

LOGGING = {"log_level": "WARNING", "enable_access_log": False}
"""Ray Serve's logging: the front logs the requests."""

HEALTH_SECONDS = 2.0
"""Seconds between Ray Serve's checks that a replica's engine is alive."""

IDLE_SECONDS = 0.5
"""Seconds between a stopping replica's checks that it has answered everything."""

DRAIN_SECONDS = 3600.0
"""Maximum seconds for a surplus replica to finish its requests; Ray Serve needs a limit."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until a signal; returns the exit code."""
    return run_until_stopped(_run, parse(argv))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags of a command line; ends the process with a one-line error if they are not valid."""
    parser = Parser(prog="shadowkv ray serve", description=__doc__)
    add_arguments(parser)
    group = parser.add_argument_group("replicas")
    group.add_argument("--replicas", type=int, default=1, metavar="N", help="number of engines (default: %(default)s)")
    text = "maximum number of engines; Ray adds some above --max-num-seqs requests per engine (default: --replicas)"
    group.add_argument("--max-replicas", type=int, metavar="N", help=text)
    text = "GPUs that Ray reserves for an engine; with 0.5 two share one (default: --tensor-parallel-size; 0 on CPUs)"
    group.add_argument("--gpus-per-replica", type=float, metavar="N", help=text)
    text = "CPU cores that Ray reserves for an engine, and number of its threads (default: %(default)s)"
    group.add_argument("--cpus-per-replica", type=int, default=1, metavar="N", help=text)
    args = parse_arguments(parser, argv)
    if args.replicas < 1:
        parser.error(f"--replicas {args.replicas} must be at least 1")
    if args.max_replicas is not None and args.max_replicas < args.replicas:
        parser.error(f"--max-replicas {args.max_replicas} must be at least --replicas, which is {args.replicas}")
    if args.cpus_per_replica < 1:
        parser.error(f"--cpus-per-replica {args.cpus_per_replica} must be at least 1")
    if args.gpus_per_replica is not None and args.gpus_per_replica < 0:
        parser.error(f"--gpus-per-replica {args.gpus_per_replica:g} must not be negative")
    return args


def _run(args: argparse.Namespace) -> int:
    with ExitStack() as stack, stops_repeated():
        try:
            config = EngineConfig.from_args(args)
            settings = with_surroundings(ServerSettings.from_args(args))
            listener = stack.enter_context(bound_socket(settings))
            import ray
            from ray import serve

            ray.init(logging_level=logging.WARNING)
            stack.callback(ray.shutdown)
            exit_on_signals()  # replaces the handler that Ray has installed
            serve.start(proxy_location="Disabled", logging_config=LOGGING)
            stack.callback(serve.delete, APP_NAME)
            handle: DeploymentHandle[Any] = serve.run(
                _application(args, config, settings), name=APP_NAME, route_prefix=None
            )
            lines, model = handle.describe.remote().result()
        except (ValueError, MemoryError, OSError, RuntimeError) as error:
            print(f"error: {one_line(error)}", file=sys.stderr)
            return 2
        for line in lines:
            print(line, flush=True)
        from shadowkv.ray.front import build_front
        from shadowkv.serve.http.server import server_on

        front = build_front(handle, APP_NAME, model, settings)
        server_on(listener, front.app, [front.stop]).run(sockets=[listener])
    return 0


def check_room(args: argparse.Namespace, gpus: float) -> None:
    """Raises ValueError if this machine has fewer CPU cores or GPUs than the replicas need: Ray would wait for them
    forever. If RAY_ADDRESS names a cluster, nothing is checked, since a cluster can get more nodes."""
    import ray

    if os.environ.get("RAY_ADDRESS", "local") != "local":
        return
    available = ray.cluster_resources()
    for flag, each, name in (("--cpus-per-replica", args.cpus_per_replica, "CPU"), ("--gpus-per-replica", gpus, "GPU")):
        if args.replicas * each > available.get(name, 0):
            raise ValueError(
                f"--replicas {args.replicas} with {flag} {each:g} need {args.replicas * each:g} {name}s, and this "
                f"machine has {available.get(name, 0):g}"
            )


def _application(args: argparse.Namespace, config: EngineConfig, settings: ServerSettings) -> Application:
    """The replicas as a Ray Serve application."""
    import ray
    from ray import serve

    from shadowkv.ray.replica import Replica
    from shadowkv.ray.router import PrefixRouter

    gpus = args.gpus_per_replica
    if gpus is None:
        there = config.device != "cpu" and ray.cluster_resources().get("GPU", 0)
        gpus = float(config.tensor_parallel_size) if there else 0.0
    check_room(args, gpus)
    max_replicas = args.replicas if args.max_replicas is None else args.max_replicas
    scaling = {
        "min_replicas": args.replicas,
        "max_replicas": max_replicas,
        "target_ongoing_requests": config.max_num_seqs,
    }
    deployment = serve.deployment(
        Replica,
        name="Replica",
        **({"autoscaling_config": scaling} if max_replicas > args.replicas else {"num_replicas": args.replicas}),
        # This limit is never exceeded, since the front accepts no more connections. As in a plain server, the engine's
        # own queue refuses requests if there are too many.
        max_ongoing_requests=settings.max_connections,
        ray_actor_options={"num_cpus": args.cpus_per_replica, "num_gpus": gpus},
        logging_config=LOGGING,
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        graceful_shutdown_wait_loop_s=IDLE_SECONDS,
        max_constructor_retry_count=1,
        request_router_config=PrefixRouter.config(margin_of(config.max_num_seqs)),
    )
    own: dict[str, Any] = {name: getattr(ServerSettings, name) for name in SEEN_TO}
    own["storage_mib"] = 0.0  # nothing is stored: the next request may go to another replica
    settings = replace(settings, **own, disable_uvicorn_access_log=True)
    return deployment.bind(config, settings.compare, settings)
