"""``shadowkv serve``: an OpenAI-compatible server, or, with ``--input`` and ``--output``, a batch run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from shadowkv.command_line import Parser, one_line
from shadowkv.engine.child_process import STOP_SECONDS
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.vllm_flags import DATA_PARALLEL_SIZE
from shadowkv.serve.batch.files import BatchFiles
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.process import ENGINE_DIED, run_until_stopped, stops_repeated
from shadowkv.serve.start import (
    add_arguments,
    add_batch_files,
    bound_socket,
    parse_arguments,
    start_engine,
    start_replicas,
    with_surroundings,
)
from shadowkv.serve.workers import Workers

if TYPE_CHECKING:
    from shadowkv.engine.process.launch import EngineProcess, ReplicaProcesses

CONCURRENCY = 2
"""A batch run has this many requests in flight for each sequence that the engine can run at once. Requests that do not
run yet wait in the engine, already tokenized."""


def main(
    argv: Sequence[str] | None = None,
    start: Callable[[EngineConfig, str | None], EngineProcess] | None = None,
    start_several: Callable[[EngineConfig, int], ReplicaProcesses] | None = None,
) -> int:
    """Runs the command line; returns the exit code. ``start`` starts the engine process (default: ``start_engine``),
    ``start_several`` those of several engines (default: ``start_replicas``)."""
    return run_until_stopped(partial(_run, start or start_engine, start_several or start_replicas), parse(argv))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the flags of a command line; ends the process with a one-line error if they are not valid."""
    parser = Parser(prog="shadowkv serve", description=__doc__)
    add_arguments(parser, DATA_PARALLEL_SIZE)
    text = "number of engines behind the port, each with --tensor-parallel-size GPUs of its own (default: %(default)s)"
    parser.add_argument(DATA_PARALLEL_SIZE, "-dp", type=int, default=1, metavar="N", help=text)
    text = "number of HTTP processes in front of the engine; limits hold for their total (default: %(default)s)"
    parser.add_argument("--api-server-count", type=int, default=1, metavar="N", help=text)
    add_batch_files(parser.add_argument_group("batch mode, instead of a server"), required=False)
    args = parse_arguments(parser, argv)
    if (args.input is None) != (args.output is None):
        parser.error("--input and --output go together")
    if args.compare is not None and args.input is not None:
        parser.error("--compare is for a server, not for a batch run")
    if args.compare is not None and args.tensor_parallel_size > 1:
        parser.error("--compare takes --tensor-parallel-size 1: both policies share one copy of the weights")
    if args.compare is not None and (args.speculative_config or {}).get("method") == "mtp":
        parser.error("--compare does not go with --speculative-config method 'mtp': both policies share one draft head")
    if args.api_server_count < 1:
        parser.error(f"--api-server-count {args.api_server_count} must be at least 1")
    if args.api_server_count > 1 and args.input is not None:
        parser.error("--api-server-count is for a server, not for a batch run")
    if args.resume and args.output is None:
        parser.error("--resume goes with --input and --output")
    if args.data_parallel_size != 1:
        _check_replicas(parser, args)
    return args


def _check_replicas(parser: Parser, args: argparse.Namespace) -> None:
    """Ends the process with a one-line error if other flags do not go with several engines."""
    given = f"--data-parallel-size {args.data_parallel_size}"
    if args.data_parallel_size < 1:
        parser.error(f"{given} must be at least 1")
    if args.input is not None:
        parser.error(f"{given} is for a server; for a file of requests there is shadowkv ray batch --replicas N")
    if args.api_server_count > 1:
        parser.error(f"{given} takes --api-server-count 1: one HTTP process knows which engine has which prompt")
    if args.compare is not None:
        parser.error(f"{given} does not go with --compare, which has two engines on one GPU")
    if args.device not in ("auto", "cuda", "cpu"):
        parser.error(f"{given} takes --device auto, cuda or cpu, not {args.device}: each engine has GPUs of its own")


def _run(
    start: Callable[[EngineConfig, str | None], EngineProcess],
    start_several: Callable[[EngineConfig, int], ReplicaProcesses],
    args: argparse.Namespace,
) -> int:
    with ExitStack() as stack, stops_repeated():
        try:
            config, settings = EngineConfig.from_args(args), ServerSettings.from_args(args)
            # Whatever can be checked cheaply is checked before the model is loaded.
            if args.input is not None:
                files = BatchFiles(args.input, args.output, args.resume)
                stack.enter_context(files.held())
            else:
                settings = with_surroundings(settings)
                listener = stack.enter_context(bound_socket(settings))
            process: EngineProcess | ReplicaProcesses
            if args.data_parallel_size > 1:
                process = start_several(config, args.data_parallel_size)
            else:
                process = start(config, settings.compare)
            stack.callback(process.stop, STOP_SECONDS)  # has no effect if ``serve`` has already stopped the process
            # With several processes, the import waits until ``Workers`` has set up the metrics that they share.
            if args.input is None and args.api_server_count == 1:
                import_module("shadowkv.serve.app")  # the import takes a second; the engine loads meanwhile
            engine = process.clients[0]
            settings.check_template(engine.tokenizer.chat_template)
            name = settings.served_name(engine.model_name)
            if args.input is None:
                workers = stack.enter_context(Workers(args.api_server_count, process, name, listener, settings))
        except (ValueError, MemoryError, OSError) as error:
            print(f"error: {one_line(error)}", file=sys.stderr)
            return 2
        for line in engine.describe():
            print(line, flush=True)
        if args.input is not None:
            from shadowkv.serve.batch.answers import run_batch

            return run_batch(engine, name, files, CONCURRENCY * config.max_num_seqs, settings)
        from shadowkv.serve.app import serve

        return ENGINE_DIED if serve(process, name, listener, workers) else 0


if __name__ == "__main__":
    sys.exit(main())
