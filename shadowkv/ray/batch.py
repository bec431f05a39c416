"""Batch files on a Ray cluster: Ray Data assigns the lines to replicas, and reassigns those of a dead replica.

This process, Ray's driver, reads and checks the file. It alone writes the output, each answer as it arrives. The output
has exactly one answer to every line, even if replicas answer a line twice. The replicas get only the positions of their
lines in the file, so every node must be able to read the input by its path.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shadowkv.command_line import Parser, one_line
from shadowkv.engine.config import EngineConfig
from shadowkv.log_format import set_up_log
from shadowkv.serve.batch.files import BatchFiles
from shadowkv.serve.batch.lines import LineRequest
from shadowkv.serve.batch.run import BatchFailed, BatchRun, run_files
from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.bodies.body import parse_json
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.process import ENGINE_DIED, exit_on_signals
from shadowkv.serve.start import add_batch_files
from shadowkv.settings import add_flag
from shadowkv.wording import counted

CONCURRENCY = 2
"""A replica has this many requests in flight for each sequence that its engine can run at once. Requests that do not
run yet wait in the engine, already tokenized."""

MAX_BLOCKS = 10_000
"""Maximum number of pieces of a file (Ray Data's blocks). A piece is answered, and retried, as a whole. It is one line
if the file has no more lines than this."""

RETRIES = 3
"""Maximum number of times that a piece is retried because a replica died while it answered the piece. Then the run
ends, because a line of the piece may be the cause."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    args = parse(argv)
    set_up_log()
    exit_on_signals()
    try:
        return _run(args)
    except (ValueError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags of a command line; ends the process with a one-line error if they are not valid."""
    parser = Parser(prog="shadowkv ray batch", description=__doc__)
    batch = parser.add_argument_group("batch")
    add_batch_files(batch, required=True)
    text = "number of engines, with --tensor-parallel-size GPUs each (default: %(default)s)"
    batch.add_argument("--replicas", type=int, default=1, metavar="N", help=text)
    add_flag(batch, ServerSettings, "served_model_name")
    EngineConfig.add_arguments(parser)
    return parser.parse_args(argv)


class Replica:
    """An engine that answers lines, in a Ray actor.

    Args:
        config: the engine's config.
        settings: the server's settings, which have the model names that clients use.
        path: the batch file.
    """

    def __init__(self, config: EngineConfig, settings: ServerSettings, path: str) -> None:
        # Imported here: the driver does not need PyTorch.
        from shadowkv.engine.process.launch import EngineProcess
        from shadowkv.serve.batch.answers import LineAnswers

        try:
            self._process = EngineProcess(config)  # the engine's process ends with this one
            engine = self._process.clients[0]
        except (ValueError, MemoryError, OSError) as error:  # not all of these can be pickled and sent to the driver
            raise RuntimeError(one_line(error)) from None
        self._answers = LineAnswers(engine, settings.served_name(engine.model_name), settings)
        self._path = path

    async def __call__(self, lines: dict[str, Any]) -> dict[str, list[str]]:
        """Answers lines. ``lines`` has three arrays with an entry for each line: ``id``, ``offset`` and ``size`` (in
        bytes). Returns the records, each as JSON; a record's id is its line's ``id``."""
        places = zip(lines["id"], lines["offset"], lines["size"], strict=True)
        requests = await asyncio.to_thread(lambda: [self._read(str(id), int(at), int(size)) for id, at, size in places])
        try:
            records = await asyncio.gather(*(self._answers.record(request) for request in requests))
        except ApiError:  # the engine has died: all other errors are part of a request's record
            os._exit(ENGINE_DIED)
        return {"record": [json.dumps(record, ensure_ascii=False) for record in records]}

    def _read(self, name: str, offset: int, size: int) -> LineRequest:
        with open(self._path, "rb") as file:
            file.seek(offset)
            request = parse_json(file.read(size))
        return LineRequest(name, request["custom_id"], request["url"], request["body"], offset, size)


def _run(args: argparse.Namespace) -> int:
    config, files = EngineConfig.from_args(args), BatchFiles(args.input, args.output, args.resume)
    if args.replicas < 1:
        raise ValueError(f"--replicas {args.replicas} must be at least 1")
    if ":" in config.device:
        raise ValueError(f"--device {config.device}: Ray assigns GPUs to replicas; pass auto, cpu or cuda")
    with files.held(), _cluster():
        resources = share(config.device, args.replicas, config.tensor_parallel_size)
        settings = ServerSettings(served_model_name=args.served_model_name)
        return run_files(files, lambda batch: answer(batch, config, settings, args.replicas, resources))


@contextmanager
def _cluster() -> Iterator[None]:
    """A context in which this process is connected to a cluster: the one in RAY_ADDRESS, or a local one on this
    machine."""
    import ray

    if ray.is_initialized():
        yield
        return
    ray.init(include_dashboard=False)
    try:
        yield
    finally:
        ray.shutdown()


def share(device: str, replicas: int, ranks: int) -> dict[str, Any]:
    """The cluster resources of each replica: a GPU for each rank or, on CPUs, an equal share of the cores. Raises
    ValueError if there are too few."""
    import ray

    available = ray.cluster_resources()
    gpus, cores = int(available.get("GPU", 0)), int(available.get("CPU", 0))
    if device == "cpu" or (device == "auto" and not gpus):
        if cores < replicas:
            raise ValueError(f"--replicas {replicas} take more than the cluster's {counted(cores, 'CPU core')}")
        return {"num_cpus": cores // replicas}
    if gpus < replicas * ranks:
        each = f" of {ranks} GPUs" if ranks > 1 else ""
        raise ValueError(f"--replicas {replicas}{each} take more than the cluster's {counted(gpus, 'GPU')}")
    return {"num_cpus": ranks, "num_gpus": ranks}


def answer(
    batch: BatchRun, config: EngineConfig, settings: ServerSettings, replicas: int, resources: dict[str, Any]
) -> None:
    """Answers every line of a run that has no answer yet. Raises BatchFailed if the replicas cannot do so."""
    import ray

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False  # the run has its own bar
    with batch.writing():
        places = {
            request.custom_id: {"id": request.id, "offset": request.offset, "size": request.size}
            for request in batch.requests()
        }
        if not places:
            return
        calls = math.ceil(CONCURRENCY * config.max_num_seqs / math.ceil(len(places) / MAX_BLOCKS))
        records = ray.data.from_items([*places.values()], override_num_blocks=min(MAX_BLOCKS, len(places))).map_batches(
            Replica,
            fn_constructor_args=(config, settings, str(batch.files.input.resolve())),
            batch_size=None,
            compute=ray.data.ActorPoolStrategy(
                size=replicas, max_tasks_in_flight_per_actor=calls, max_concurrent_calls_per_actor=calls
            ),
            max_restarts=-1,
            max_task_retries=RETRIES,
            **resources,
        )
        try:
            for block in records.iter_batches(batch_size=None, prefetch_batches=0):
                for text in block["record"]:
                    record = json.loads(text)
                    if places.pop(record["custom_id"], None) is not None:  # else it was answered twice
                        batch.write(record)
        except ray.exceptions.RayError as error:
            raise BatchFailed(str(error).strip().splitlines()[-1]) from error  # earlier lines are tracebacks
        if places:
            raise BatchFailed(f"no answer to {counted(len(places), 'line')}, such as {next(iter(places))!r}")
