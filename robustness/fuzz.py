"""Sends bodies to the server's application that are right, nearly right, and garbage; nothing may break.

``fuzz_cases.py`` makes them. A small real engine answers, in this process. Every answer must be well-formed, with no
status 5xx except a full queue's 503, and no 200 for what ``judge.py`` considers nonsense; and the server must still be
healthy afterwards.

    python -m robustness.fuzz --bodies 100000
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import itertools
import json
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from robustness.fuzz_cases import MODEL, Cases
from robustness.judge import Judge
from robustness.tiny_model import ENGINE, tiny_model
from shadowkv.engine.async_engine import AsyncEngine
from shadowkv.engine.config import EngineConfig
from shadowkv.eval.provenance import provenance
from shadowkv.serve.app import build_app

VOCAB = 256
"""Every byte is a token: the model can write whatever a JSON schema asks for."""
SERVER = {
    **ENGINE,
    "max_model_len": 512,
    "max_num_seqs": 32,
    "max_queued_seqs": 256,
    "default_max_tokens": 4,
    "kv_offload_gib": 0.0625,
}
IN_FLIGHT = 24
ANSWER_SECONDS = 60
EXAMPLES, MAX_FAULTS = 3, 1000
"""Reported faults: the first ones are informative enough."""


@dataclass
class Fuzz:
    """One run.

    Args:
        client: sends requests to the application.
        cases: the requests.
        judge: what answers are checked against.
    """

    client: httpx.AsyncClient
    cases: Cases
    judge: Judge
    statuses: defaultdict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    faults: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)
    slowest: tuple[float, int] = (0.0, -1)

    async def run(self, bodies: int, seconds: float) -> None:
        """Sends requests until there have been enough, or time is up."""
        start, numbers = time.monotonic(), itertools.count()

        async def work() -> None:
            while time.monotonic() < start + seconds and self.faults.total() < MAX_FAULTS:
                if (number := next(numbers)) >= bodies:
                    break
                if number and number % max(1, bodies // 20) == 0:
                    passed = time.monotonic() - start
                    left = passed / number * (bodies - number)
                    progress = f"{number} of {bodies} bodies, {self.faults.total()} faults, {passed:.0f} s"
                    print(f"{progress}, about {left:.0f} s left", file=sys.stderr, flush=True)
                await self._one(number)

        await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))

    async def _one(self, number: int) -> None:
        case = self.cases.make(number)
        headers = {} if case.content_type is None else {"Content-Type": case.content_type}
        start, status = time.monotonic(), 0
        try:
            sent = self.client.post(case.path, content=case.raw, headers=headers)
            response = await asyncio.wait_for(sent, ANSWER_SECONDS)
            status = response.status_code
            reason = self.judge.nonsense(case.path, case.content_type, case.raw) if status == 200 else None
            fault = f"200 for nonsense: {reason}" if reason else self.judge.malformed(case.path, case.raw, response)
        except Exception as error:
            fault = f"no answer: {type(error).__name__}: {error}"
        self.slowest = max(self.slowest, (time.monotonic() - start, number))
        self.statuses[case.path][status] += 1
        if fault is not None:
            self.faults[fault] += 1
            if self.faults[fault] <= EXAMPLES:
                raw = case.raw[:500].decode("utf-8", "backslashreplace")
                self.examples.append({"number": number, "path": case.path, "fault": fault, "body": raw})


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", type=int, default=100_000, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1800, help="stop after (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the summary there, as JSON")
    return parser.parse_args(argv)


def fuzz(args: argparse.Namespace) -> dict[str, Any]:
    """All figures of a run, and whether it passed."""
    torch.set_num_threads(1)  # tiny tensors gain nothing from a second one
    with tiny_model(vocab_size=VOCAB) as folder:
        engine = AsyncEngine(EngineConfig(model=str(folder), kv_disk_dir=str(folder / "cache"), **SERVER))
        engine.start()
        try:
            return asyncio.run(_fuzz(engine, args))
        finally:
            engine.shutdown(10)


async def _fuzz(engine: AsyncEngine, args: argparse.Namespace) -> dict[str, Any]:
    app, process = build_app(engine, MODEL), psutil.Process()
    # Uncaught exceptions become a status of 500, as behind a real server.
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://fuzz") as client:

        async def known() -> Any:
            answer = await client.post("/v1/completions", json={"prompt": "abc", "temperature": 0})
            return answer.json()["choices"]

        before = await known()
        cases, judge = Cases(app.openapi(), args.seed), Judge(MODEL, engine.max_model_len, VOCAB)
        if cases.bodies.keys() != judge.rules.keys():
            raise SystemExit(f"the server takes {[*cases.bodies]}, but judge.py has rules for {[*judge.rules]}")
        run = Fuzz(client, cases, judge)
        start, memory = time.monotonic(), process.memory_info().rss
        await run.run(args.bodies, args.seconds)
        seconds = time.monotonic() - start
        healthy = (await client.get("/health")).status_code == 200 and await known() == before
        stats = engine.stats()
    bodies = sum(sum(counts.values()) for counts in run.statuses.values())
    left = stats.running + stats.waiting
    return {
        "ok": not run.faults and healthy and not left and bodies == args.bodies,
        "bodies": bodies,
        "seconds": round(seconds, 1),
        "seed": args.seed,
        "statuses": {path: dict(sorted(counts.items())) for path, counts in sorted(run.statuses.items())},
        "faults": dict(run.faults.most_common()),
        "examples": run.examples,
        "slowest, s": round(run.slowest[0], 2),
        "slowest number": run.slowest[1],
        "healthy afterwards": healthy,
        "requests left over": left,
        "memory": {"first MiB": memory >> 20, "last MiB": process.memory_info().rss >> 20},
    }


def main() -> int:
    """Command line; returns the exit status."""
    faulthandler.enable()  # a crash in native code reports its place
    args = parse()
    summary = fuzz(args)
    codes = sorted({status for counts in summary["statuses"].values() for status in counts})
    print(f"{'status':24}", *(f"{code or 'none':>8}" for code in codes))
    for path, counts in summary["statuses"].items():
        print(f"{path:24}", *(f"{counts.get(code, 0):8}" for code in codes))
    for name, value in summary.items():
        if name not in ("statuses", "examples"):
            print(f"{name:24} {value}")
    for example in summary["examples"]:
        print(example)
    if args.out:
        args.out.write_text(json.dumps(provenance() | summary, indent=1) + "\n", encoding="utf-8")
    return 0 if summary["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
