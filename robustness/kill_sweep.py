"""Kills servers under load, again and again, and restarts them on what they left on the disk: do they still serve?

Clients ask questions about documents, each opened by a long question whose prompt computes the document. A server that
is not killed gives the expected answer to every question, with the same part of it cached; with nothing cached where
answers must not depend on that (``full``). Compressed, they also depend on the other requests in a batch: requests run
one at a time, unless ``--batch`` says otherwise, and others wait.

Then a server with a directory is killed (SIGKILL) at a random moment, every other time while a file is being written,
and the next one started on the same directory, a given number of times:

- answers must be the expected ones, log-probabilities within ``--tolerance``;
- no token may be recomputed that an intact file held when the server started;
- no file may be bad, and none may be gone; half-written ones are counted.

    python -m robustness.kill_sweep --kv full turbo:dense_below=0 --out results/kills.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from robustness.live_server import Answer, Lost, SoakClient, compare, kill_server, start_server, stop_server
from shadowkv.engine.config import DEFAULT_MODEL
from shadowkv.eval.provenance import provenance
from shadowkv.eval.records.predictions import write_json
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.prefix_cache.disk.files import SnapshotFile
from shadowkv.prefix_cache.disk.filesystem import TEMPORARY
from shadowkv.prefix_cache.disk.inventory import Inventory
from shadowkv.prefix_cache.page_hashes import PageHashes

WORDS = ("the", "of", "rain", "stone", "key", "seven", "river", "old", "paper", "green", "music", "window", "glass")
OPENING_WORDS, QUESTION_WORDS = 120, 12
"""An opening question is longer than what stays exact after a document, which is then compressed as its prompt is."""
MIN_SECONDS, LOOK_SECONDS = 0.2, 0.002

Question = tuple[int, int]
"""A document's number, and that of a question about it; 0 opens the document."""


@dataclass(frozen=True)
class Held:
    """What a directory of snapshots holds of prompts, with every byte read.

    Attributes:
        origin: the link before the first page's hash; empty without a file.
        pages: hashes of the pages that usable files hold.
        files: names of all files.
        bad: names of those that are not what was written.
        half_written: temporary files, and their bytes.
    """

    origin: str
    pages: frozenset[str]
    files: frozenset[str]
    bad: frozenset[str]
    half_written: tuple[int, int]

    @classmethod
    def of(cls, directory: Path) -> Held:
        """Reads every byte."""
        inventory = Inventory(directory)
        rows = inventory.rows()
        bad = inventory.verify([row["name"] for row in rows], lambda count: None).keys() | inventory.bad.keys()
        pages, origin = set[str](), ""
        for row in rows:
            chain = inventory.chain(row["name"])
            if not chain or bad & {header.name for header in chain}:
                continue
            tokens, origin = list[int](), row["origin"]
            for header in chain:
                with SnapshotFile(directory, header.name) as file:
                    tokens[header.start :] = file.token_ids().tolist()
            pages |= set(PageHashes(origin).extend_to(tokens))
        temporary = [path.stat().st_size for path in directory.glob(f"{TEMPORARY}*")]
        files = frozenset(row["name"] for row in rows) | frozenset(inventory.bad)
        return cls(origin, frozenset(pages), files, frozenset(bad), (len(temporary), sum(temporary)))

    def tokens(self, prompt: list[int]) -> int:
        """How many of a prompt's tokens files hold, except the last, which is always computed."""
        hashes = PageHashes(self.origin).extend_to(prompt[:-1]) if self.origin else []
        return PAGE * next((number for number, page in enumerate(hashes) if page not in self.pages), len(hashes))


@dataclass
class Sweep:
    """All runs of a policy.

    Attributes:
        known: expected answers of questions by number of cached tokens; 0 stands for any number where answers must not
            depend on it.
        prompts: tokens of questions.
    """

    args: argparse.Namespace
    kv: str
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    known: dict[tuple[Question, int], Answer] = field(default_factory=dict)
    prompts: dict[Question, list[int]] = field(default_factory=dict)
    largest_difference: float = 0.0
    slowest_start: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.args.seed)
        self.messages = dict(self._questions())

    def _questions(self) -> Iterator[tuple[Question, list[dict[str, str]]]]:
        for number in range(self.args.documents):
            words = self.random.randint(*self.args.words)
            document = f"Document {number}. {self._text(words)}"
            for question in range(self.args.questions):
                text = self._text(QUESTION_WORDS if question else OPENING_WORDS)
                asked = {"role": "user", "content": f"Question {question}: {text}?"}
                yield (number, question), [{"role": "system", "content": document}, asked]

    def _text(self, words: int) -> str:
        return " ".join(self.random.choices(WORDS, k=words))

    def flags(self, directory: Path | None) -> dict[str, Any]:
        """Flags of a server."""
        args = self.args
        flags = {"model": args.model, "load_format": args.load_format, "device": args.device, "kv": self.kv}
        flags |= {"max_num_seqs": args.batch, "max_cached_seqs": args.cached, "max_model_len": args.max_model_len}
        flags["max_num_batched_tokens"] = 1024  # documents are computed one after another: some are done before a kill
        return flags | ({} if directory is None else {"kv_disk_dir": directory, "kv_disk_gib": 8})

    def run(self, folder: Path) -> None:
        """Servers one after another, with their files in a folder; the first is not killed."""
        directory, self.temporary = folder / "cache", folder / "tmp"
        for part in (directory, self.temporary):
            part.mkdir()
        self._serve(None, self.learn)
        held = Held.of(directory)
        for kill in range(self.args.kills):
            self._serve(directory, lambda client, held=held: self.load(client, directory, held))
            self.counts["kills"] += 1
            held = self._left(directory, held)
            done = ("answered", "same", "near-ties", "wrong", "computed again", "half-written files")
            text = ", ".join(f"{self.counts[name]} {name}" for name in done)
            print(f"{self.kv}: {kill + 1} of {self.args.kills} kills, {text}", file=sys.stderr, flush=True)
        self._serve(directory, lambda client: self.ask_all(client, held))
        self._left(directory, held)

    def _left(self, directory: Path, before: Held) -> Held:
        """What a server has left behind."""
        held = Held.of(directory)
        self.counts["bad files"] += len(held.bad)
        self.counts["files gone"] += len(before.files - held.files)
        self.counts["files"] = len(held.files)
        self.counts["half-written files"], self.counts["bytes of these"] = held.half_written
        return held

    def _serve(self, directory: Path | None, use: Any) -> None:
        """Starts a server, and calls ``use`` on it, which says whether it is to be killed."""
        start = time.monotonic()
        process, url = start_server(self.flags(directory), self.temporary)
        self.slowest_start = max(self.slowest_start, time.monotonic() - start)
        self.counts["starts"] += 1
        with process:
            try:
                self.process = process
                asyncio.run(self._connected(url, use))
            except BaseException:
                kill_server(process)
                raise
            if process.poll() is None:
                stop_server(process)

    async def _connected(self, url: str, use: Any) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=600) as connection:
            await use(SoakClient(connection, self.args))

    # -- what servers are asked ------------------------------------------------------------------------------------

    async def learn(self, client: SoakClient) -> None:
        """Answers with nothing cached; and, if they depend on that, with a document cached, then the question too."""
        for question, messages in self.messages.items():
            self.prompts[question] = (await client.post("/tokenize", {"messages": messages}))["tokens"]
        if self.kv == "full":
            await asyncio.gather(*(self._learn(client, question, cache_prompt=False) for question in self.messages))
            return
        for number in range(self.args.documents):
            await self._learn(client, (number, 0))
            for first in (1, 0):
                asked = [(number, question) for question in range(first, self.args.questions)]
                await asyncio.gather(*(self._learn(client, question) for question in asked))

    async def _learn(self, client: SoakClient, question: Question, **options: Any) -> None:
        turn = await client.turn(self.messages[question], **options)
        self.known.setdefault((question, self._cached(turn.cached)), turn.answer)

    def _cached(self, tokens: int) -> int:
        return 0 if self.kv == "full" else tokens

    async def load(self, client: SoakClient, directory: Path, held: Held) -> None:
        """Clients send questions until the server is killed."""
        opened = [asyncio.Lock() for _ in range(self.args.documents)]
        done = set[int]()
        clients = [
            asyncio.create_task(self._client(client, held, opened, done, random.Random(self.random.random())))
            for _ in range(self.args.clients)
        ]
        await self._moment(directory)
        kill_server(self.process)
        await asyncio.gather(*clients)

    async def _moment(self, directory: Path) -> None:
        """Waits for the moment of a kill: any, or every other time one when something has been answered and a file
        is half written, if that occurs."""
        if self.counts["kills"] % 2 == 0:
            await asyncio.sleep(self.random.uniform(MIN_SECONDS, self.args.seconds))
            return
        answered, deadline = self.counts["answered"], time.monotonic() + self.args.seconds
        left = set(directory.glob(f"{TEMPORARY}*"))  # by earlier kills
        while time.monotonic() < deadline:
            if self.counts["answered"] > answered and not left.issuperset(directory.glob(f"{TEMPORARY}*")):
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def _client(
        self, client: SoakClient, held: Held, opened: list[asyncio.Lock], done: set[int], draw: random.Random
    ) -> None:
        while True:
            number = draw.randrange(self.args.documents)
            async with opened[number]:  # what computes a document must always be the same
                if number not in done and not await self.ask(client, (number, 0), held):
                    return
                done.add(number)
            for _ in range(draw.randint(1, 3)):
                if not await self.ask(client, (number, draw.randrange(self.args.questions)), held):
                    return

    async def ask_all(self, client: SoakClient, held: Held) -> None:
        """Every question once, to a server that is then told to end."""
        for question in self.messages:
            await self.ask(client, question, held)
        self.counts["files found corrupt"] = int(await client.gauge("shadowkv:prefix_cache_corrupt_files_total"))

    async def ask(self, client: SoakClient, question: Question, held: Held) -> bool:
        """Asks and checks; returns whether the server is still there."""
        self.counts["requests"] += 1
        try:
            turn = await client.turn(self.messages[question])
        except (Lost, httpx.HTTPError, ValueError, KeyError) as error:
            if self.process.poll() is not None or isinstance(error, httpx.HTTPError):
                self.counts["cut off"] += 1
            else:
                self.fault(f"{type(error).__name__}: {error}")
            return False
        self.judge(question, turn.cached, turn.answer, held.tokens(self.prompts[question]))
        return True

    def judge(self, question: Question, cached: int, answer: Answer, held: int) -> None:
        """Counts an answer with ``cached`` tokens cached, of which files held ``held``."""
        tokens = len(self.prompts[question])
        self.counts.update({"answered": 1, "prompt tokens": tokens, "cached": cached, "held by files": held})
        if cached < held:
            self.counts["computed again"] += held - cached
            self.fault(f"{question}: {cached} of {tokens} tokens cached, files hold {held}")
        if self.kv != "full" and cached % PAGE:  # its answer depends on when the exact tail was computed
            self.counts["went on with another's tail"] += 1
            return
        expected = self.known.get((question, self._cached(cached)))
        if expected is None:
            self.counts["cached otherwise"] += 1
            self.known[question, cached] = answer
            return
        verdict, difference = compare(expected, answer, self.args.tolerance)
        self.largest_difference = max(self.largest_difference, difference)
        self.counts[verdict] += 1
        if verdict == "wrong":
            texts = "".join(answer.tokens), "".join(expected.tokens)
            where = f"{question} with {cached} tokens cached"
            self.fault("{} wrong by {:.4f}: {!r} for {!r}".format(where, difference, *texts))

    def fault(self, text: str) -> None:
        """Records a fault."""
        self.faults.append(text[:300])
        print(f"{self.kv}: {self.faults[-1]}", file=sys.stderr, flush=True)

    def summary(self) -> dict[str, Any]:
        """All figures, and whether the run passed."""
        names = ("kills", "starts", "requests", "answered", "cut off", "same", "near-ties", "wrong", "cached otherwise")
        names += ("went on with another's tail",)
        names += ("prompt tokens", "cached", "held by files", "computed again", "files", "bad files", "files gone")
        names += ("files found corrupt", "half-written files", "bytes of these")
        never = ("wrong", "computed again", "bad files", "files gone", "files found corrupt")
        well = not self.faults and not any(self.counts[name] for name in never)
        return {
            "kv": self.kv,
            "ok": well and self.counts["kills"] == self.args.kills and self.counts["held by files"] > 0,
            **{name: self.counts[name] for name in names},
            "slowest start, s": round(self.slowest_start, 1),
            "largest difference in log-probability": self.largest_difference,
            "faults": self.faults,
        }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="(default: %(default)s)")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"), help="(default: %(default)s)")
    parser.add_argument("--device", default="auto", help="(default: %(default)s)")
    parser.add_argument("--kv", nargs="+", default=["full", "turbo:dense_below=0"], help="(default: %(default)s)")
    parser.add_argument("--kills", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=25, help="of load, at the most (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="requests that run at once (default: %(default)s)")
    parser.add_argument("--cached", type=int, default=2, help="sequences kept on the device (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=12, help="(default: %(default)s)")
    parser.add_argument("--questions", type=int, default=3, help="about each (default: %(default)s)")
    parser.add_argument("--words", type=int, nargs=2, default=(300, 800), help="of a document (default: %(default)s)")
    parser.add_argument("--max-model-len", type=int, default=2560, help="(default: %(default)s)")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of log-probabilities (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the summary there, as JSON")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs it; returns 1 if anything failed."""
    args = parse(argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also if it was started in the background
    results: list[dict[str, Any]] = []
    for kv in args.kv:
        sweep = Sweep(args, kv)
        with TemporaryDirectory(prefix="kills-") as folder:
            try:
                sweep.run(Path(folder))
            except KeyboardInterrupt:
                print("interrupted: what there is so far", file=sys.stderr)
        results.append(sweep.summary())
        print(json.dumps(results[-1], indent=2))
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            write_json(args.out, {**provenance(), "runs": results})
        if sweep.counts["kills"] < args.kills:
            break
    return 0 if all(one["ok"] for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
