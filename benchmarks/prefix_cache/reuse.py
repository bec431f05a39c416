"""The cost of prompts that were computed before: many questions about one document, restores, and a trace of chats.

Prompts are random token ids; TTFT counts from the moment a request is submitted. Each case has its own engine.

    shared      concurrent requests with the same document, each with another question
    one-by-one  such requests one after the other, while only host memory has the document
    restore     a document comes back from host memory, with no other requests
    disk        a document comes back from disk, with an empty page cache; prints the time of a plain read of its file
    trace       chats of several turns over documents, a few at a time; the device keeps a quarter of the documents
    copies      decode steps of a full batch, while its prompts are copied to host memory and, if given, to --disk
                (row "on"), and without copies (row "off"), in one engine

    python -m benchmarks.prefix_cache.reuse --load-format dummy --kv turbo --out results/summary.csv --disk DIR
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.prefix_cache.chat_trace import ChatTrace, TraceShape
from benchmarks.sweeps import engines
from benchmarks.sweeps.engines import Cell
from benchmarks.sweeps.rows import REUSE, Rows
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.outputs import TokenOutput
from shadowkv.prefix_cache.eviction import POLICIES

CASES = ("shared", "one-by-one", "restore", "disk", "trace", "copies")
COMPARED = ("shared", "one-by-one", "trace")
"""Cases that are also measured without reuse."""

COPY_ROUNDS = 8
"""Number of parts of the batch. The parts are copied one after another."""

ANSWER = 32
"""Tokens of an answer that a sequence has room for, as a multiple of the number of steps that are measured without
copies."""


@dataclass
class Asked:
    """Figures of finished requests.

    Attributes:
        to_first: seconds to the first token of each request.
        output, prompt: number of tokens of all answers, and of all prompts.
    """

    to_first: list[float] = field(default_factory=list)
    output: int = 0
    prompt: int = 0

    def add(self, output: TokenOutput, start: float) -> None:
        """Adds a step's tokens of a request that was submitted at ``start``."""
        self.output += len(output.token_ids)
        if output.finish_reason:
            assert output.times.first_token is not None
            self.to_first.append(output.times.first_token - start)
            self.prompt += output.prompt_tokens

    def __iadd__(self, other: Asked) -> Asked:
        self.to_first, self.output = self.to_first + other.to_first, self.output + other.output
        self.prompt += other.prompt
        return self


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = engines.sweep_parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--reuse", nargs="+", choices=("on", "off"), default=["on"], help="(default: on)")
    parser.add_argument("--document", type=int, default=61440, help="tokens (default: %(default)s)")
    parser.add_argument(
        "--restored", type=int, nargs="+", default=[61440, 124928], help="tokens (default: %(default)s)"
    )
    parser.add_argument("--own", type=int, default=512, help="tokens of a question (default: %(default)s)")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=48, help="(default: %(default)s)")
    parser.add_argument("--chats", type=int, default=40, help="of the trace (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=4, help="of a chat (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=24, help="of the trace (default: %(default)s)")
    parser.add_argument("--shortest", type=int, default=8192, help="document of the trace (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=4, help="chats of the trace (default: %(default)s)")
    parser.add_argument("--kv-offload-gib", type=float, default=48.0, help="(default: %(default)s)")
    text = "(default: %(default)s)"
    parser.add_argument("--eviction", choices=tuple(POLICIES), default=EngineConfig.eviction, help=text)
    parser.add_argument("--disk", type=Path, help="an empty folder for the case of that name")
    args = parser.parse_args(argv)
    rows, well = Rows(args.out, REUSE), True
    for cell in engines.combinations(args):
        for case in args.cases:
            for reuse in args.reuse if case in COMPARED else ["on"]:
                for tokens in args.restored if case in ("restore", "disk") else [args.document]:
                    cell |= {"case": case, "reuse": reuse, "tokens": tokens}
                    cell["replayed_density"] = engines.replayed_density(args.replay[0], tokens)
                    if not rows.has(cell):
                        well &= engines.in_fresh_process(sweep, args, dict(cell))
    return 0 if well else 1


def sweep(args: argparse.Namespace, cell: Cell) -> None:
    """Measures and adds one row; for ``copies``, two rows."""
    case = cell["case"]
    longest = cell["tokens"] + args.turns * (args.own + args.output) + 64
    if case == "copies":
        longest = cell["tokens"] + ANSWER * args.output
    at_once = args.requests if case in ("shared", "copies") else args.at_once
    settings = {"max_model_len": longest, "max_num_seqs": at_once}
    settings["eviction"] = args.eviction
    if cell["reuse"] == "off":
        settings["enable_prefix_caching"] = False
    elif case != "shared":
        settings["kv_offload_gib"] = args.kv_offload_gib
    if case == "trace":
        settings["max_cached_seqs"] = args.documents // 4
    if case == "disk" and args.disk is None:
        raise ValueError("the case 'disk' needs --disk DIR")
    if case in ("disk", "copies") and args.disk is not None:
        directory = args.disk / f"{case}-{cell['tokens']}"
        settings |= {"kv_disk_dir": str(directory), "kv_disk_gib": 4 * args.kv_offload_gib}
    engine = engines.engine_of(args, cell, **settings)
    for line in engine.notes:
        print(line, flush=True)
    ask(engine, [engines.random_prompt(engine, min(512, cell["tokens"]), random.Random(1))], 4)
    measured: dict[str, Callable[[], dict[str, float | None]]] = {
        "shared": lambda: shared(engine, args),
        "one-by-one": lambda: one_by_one(engine, args),
        "restore": lambda: restore(engine, cell["tokens"]),
        "disk": lambda: from_disk(engine, Path(settings["kv_disk_dir"]), cell["tokens"]),
        "trace": lambda: trace(engine, args),
    }
    rows = Rows(args.out, REUSE)
    if case == "copies":
        alone, beside = copies(engine, args.document, args.output)
        rows.add(cell | {"reuse": "off"} | alone | engines.about(engine))
        rows.add(cell | beside | engines.about(engine))
    else:
        rows.add(cell | measured[case]() | engines.about(engine))
    engine.close()
    if case == "copies" and args.disk is not None:
        shutil.rmtree(directory)


def ask(engine: Engine, prompts: list[list[int]], output: int, first: int = 0) -> Asked:
    """Submits all prompts at once, and runs the engine until the last token."""
    asked, start = Asked(), time.monotonic()
    for number, prompt in enumerate(prompts):
        engine.add_request(str(first + number), prompt, engines.greedy(output))
    while engine.has_work:
        for output in engines.step(engine):
            asked.add(output, start)
    return asked


def settle(engine: Engine) -> None:
    """Waits until copies to other tiers have ended."""
    while engine.settling:
        engine.step()


def forget_device(engine: Engine) -> None:
    """Evicts all cached sequences from the device."""
    settle(engine)
    while engine.scheduler.prefix_cache.evict():
        pass


def figures(engine: Engine, asked: Asked, wall: float, before: dict[str, int]) -> dict[str, float | None]:
    """Returns the columns of a row. Hit rates are shares of the prompt tokens."""
    p50, p99 = np.percentile(asked.to_first, (50, 99)).tolist()
    rates = {f"hit_rate_{tier}": (count - before[tier]) / asked.prompt for tier, count in hits(engine).items()}
    return {"wall_s": wall, "ttft_p50_s": p50, "ttft_p99_s": p99, "output_tokens_per_s": asked.output / wall, **rates}


def hits(engine: Engine) -> dict[str, int]:
    """Returns the number of prompt tokens found so far on each tier; 0 for tiers that the engine does not have."""
    tiers = engine.stats().prefixes
    return {tier: tiers[tier].hit_tokens if tier in tiers else 0 for tier in ("device", "host", "disk")}


def questions(engine: Engine, args: argparse.Namespace, count: int) -> list[list[int]]:
    """Returns ``count`` prompts that begin with one document, each with another question."""
    draw = random.Random(0)
    document = engines.random_prompt(engine, args.document, draw)
    return [document + engines.random_prompt(engine, args.own, draw) for _ in range(count)]


def shared(engine: Engine, args: argparse.Namespace) -> dict[str, float | None]:
    """Measures all requests at once."""
    prompts, before, start = questions(engine, args, args.requests), hits(engine), time.monotonic()
    asked = ask(engine, prompts, args.output)
    return figures(engine, asked, time.monotonic() - start, before)


def one_by_one(engine: Engine, args: argparse.Namespace) -> dict[str, float | None]:
    """The first request computes the document. Before each other request, the document is evicted from the device."""
    first, *others = questions(engine, args, 1 + min(args.requests, 10))
    ask(engine, [first], args.output)
    before, all_asked, wall = hits(engine), Asked(), 0.0
    for number, prompt in enumerate(others):
        forget_device(engine)
        start = time.monotonic()
        asked = ask(engine, [prompt], args.output, first=number)
        wall += time.monotonic() - start
        all_asked += asked
    return figures(engine, all_asked, wall, before)


def restore(engine: Engine, tokens: int) -> dict[str, float | None]:
    """Requests a document with an answer of one token several times. ``wall_s`` is the time of the restore alone, from
    its launch."""
    document = engines.random_prompt(engine, tokens, random.Random(0))
    ask(engine, [document], 1)
    before, asked, walls = hits(engine), Asked(), []
    for _ in range(5):
        forget_device(engine)
        then = engine.stats().prefixes["host"]
        asked += ask(engine, [document], 1)
        settle(engine)
        now = engine.stats().prefixes["host"]
        walls.append(now.restore_seconds - then.restore_seconds)
        print(f"restored {now.restored_bytes - then.restored_bytes} bytes in {walls[-1]:.4f} s", flush=True)
    return figures(engine, asked, float(np.median(walls)), before)


def from_disk(engine: Engine, directory: Path, tokens: int) -> dict[str, float | None]:
    """Requests a document that only the disk has: a new engine is opened, and the file is not in the operating system's
    page cache."""
    document = engines.random_prompt(engine, tokens, random.Random(0))
    ask(engine, [document], 1)
    settle(engine)
    engine.close()
    files = sorted(directory.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    forget_pages(files[-1])
    start, size = time.monotonic(), files[-1].stat().st_size
    with files[-1].open("rb", buffering=0) as file:
        buffer = bytearray(2**24)
        while file.readinto(buffer):
            pass
    plain = time.monotonic() - start
    forget_pages(files[-1])
    again = engines.opened(engine.config)
    while again.scheduler.prefix_cache.opening:
        time.sleep(0.001)
    before, start = hits(again), time.monotonic()
    asked = ask(again, [document], 1)
    wall = time.monotonic() - start
    lower = again.scheduler.prefix_cache.lower
    assert lower is not None and lower.disk is not None
    read = lower.disk.stats().restore_seconds
    print(f"{size} bytes: plain read {plain:.3f} s, read and verified {read:.3f} s", flush=True)
    row = figures(again, asked, wall, before)
    again.close()
    shutil.rmtree(directory)
    return row


def forget_pages(file: Path) -> None:
    """Removes a file from the operating system's page cache."""
    with file.open("rb") as opened_file:
        os.fsync(opened_file.fileno())
        os.posix_fadvise(opened_file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def trace(engine: Engine, args: argparse.Namespace) -> dict[str, float | None]:
    """Measures chats over documents."""
    shape = TraceShape(args.chats, args.turns, args.documents, args.shortest, args.document, args.own, args.at_once)
    chats = ChatTrace(shape, lambda tokens, draw: engines.random_prompt(engine, tokens, draw))
    total = sum(chats.lengths) * engine.cache.demand(args.document, args.document)["device"] / args.document
    print(f"documents: {total:.0f} blocks, the device has {engine.cache.total['device']}", flush=True)
    asked, offered, before = Asked(), dict[str, tuple[int, float]](), hits(engine)
    start = time.monotonic()
    while True:
        for chat, prompt in chats.due():
            name = f"{chat} {len(prompt)}"
            offered[name] = chat, time.monotonic()
            engine.add_request(name, prompt, engines.greedy(args.output))
        if not engine.has_work:
            return figures(engine, asked, time.monotonic() - start, before)
        for output in engines.step(engine):
            chat, at = offered[output.request_id]
            asked.add(output, at)
            chats.came(chat, output.token_ids, output.finish_reason is not None)


@dataclass
class Steps:
    """Decode steps of one kind: their number, tokens, and seconds."""

    count: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def take(self, engine: Engine) -> None:
        """Runs and adds one more step. Raises ValueError if a request ends in this step."""
        start = time.monotonic()
        outputs = engines.step(engine)
        self.seconds += time.monotonic() - start
        self.count += 1
        self.tokens += sum(len(output.token_ids) for output in outputs)
        if any(output.finish_reason for output in outputs):
            raise ValueError("a request ended before the batch was full or its copies were made: raise --output")

    def figures(self) -> dict[str, float | None]:
        """Columns of a row."""
        return {"wall_s": self.seconds, "output_tokens_per_s": self.tokens / self.seconds}


def copies(engine: Engine, document: int, output: int) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """Columns of two rows: for decode steps of a full batch without copies, and for steps while the batch's prompts are
    copied to lower tiers. The batch is prefilled without copies. Then, a few sequences at a time, steps without copies
    alternate with steps during copies of these sequences, so that both kinds of steps have the same lengths.

    Args:
        document: tokens of each prompt; the prompts have nothing in common.
        output: number of steps to measure without copies. The number of steps during copies depends on how long the
            copies take.
    """
    draw, batch, prefixes = random.Random(0), engine.config.max_num_seqs, engine.scheduler.prefix_cache
    for number in range(batch):
        prompt = engines.random_prompt(engine, document, draw)
        engine.add_request(f"copied {number}", prompt, engines.greedy(engine.cache.max_model_len - document))
    with prefixes.on_the_device_alone():
        while len(engine.scheduler.running) < batch:
            Steps().take(engine)
    alone, beside, before = Steps(), Steps(), engine.stats().prefixes
    for number in range(COPY_ROUNDS):
        for _ in range(-(-output // COPY_ROUNDS)):
            alone.take(engine)
        for running in engine.scheduler.running[number::COPY_ROUNDS]:
            assert running.request.prompt is not None, "reuse is on"
            prefixes.computed(running.sequence, running.request.prompt)
        while engine.settling:
            beside.take(engine)
    for name, tier in engine.stats().prefixes.items():
        if name != "device":
            print(f"{name}: {tier.copied_bytes - before[name].copied_bytes} bytes, {tier.refused} copies refused")
    print(f"{alone.count} steps alone, {beside.count} beside copies", flush=True)
    return alone.figures(), beside.figures()


if __name__ == "__main__":
    sys.exit(main())
