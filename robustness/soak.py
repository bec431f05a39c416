"""Mixed load on a live server on this machine: nothing lost, nothing wrong, nothing left over; stops by itself.

Good requests (whole and streamed, 1 token to the limit, chats of several turns), clients that hang up, and hostile ones
(bad and giant bodies, half requests, silence, streams that are not read), in random order; the load comes and goes, so
that queues fill up and cached sequences survive. /health is requested meanwhile, and the summary says how long it took.
Greedy answers must be those that the same requests get alone with the same number of cached tokens (prompts before the
load, turns of chats after it): log-probabilities within ``--tolerance``. Where two tokens were that close, rounding may
choose the other one, which is counted as a near-tie.

    python -m robustness.soak                # starts its own server, with a tiny model
    python -m robustness.soak --base-url http://127.0.0.1:8000 --tolerance 0.1 --requests 300
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from robustness.client import Lost, Turn
from robustness.server import SERVER, SLOTS, own_server
from robustness.soak_answer import Answer, compare
from robustness.soak_health import HealthProbe
from robustness.soak_hostile import HostileClients
from shadowkv.eval.provenance import provenance

WEIGHTS = {"whole": 33, "stream": 28, "hang up": 10, "bad": 9, "chat": 8}
WEIGHTS |= {"slow reader": 3, "silent": 2, "half header": 2, "half body": 2, "giant body": 3}
TURNS = 3
FILLING_ANSWER = 200
"""Answer length when every slot is filled: longer ones would need more fitted states than there are."""
TIDE = 250
"""Requests between high tide, when every client works, and low tide, when every fourth one does."""
MAX_FAULTS = 100
"""Reported faults: the first ones are informative enough."""
WORDS = ("the", "of", "rain", "stone", "key", "seven", "river", "old", "paper", "green", "music", "window", "glass")

RETRY_SECONDS = 2


@dataclass
class Soak(HostileClients):
    """One run."""

    faults: list[str] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)
    chats: list[list[Turn]] = field(default_factory=list)
    largest_difference: float = 0.0
    begun: int = 0
    stopped: bool = False

    async def run(self) -> dict[str, Any]:
        """The summary."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.stop, number)
        self.random = random.Random(self.args.seed)
        model = (await self.client.get("/v1/models")).json()["data"][0]
        self.limit = model["max_model_len"]
        text = " ".join(self.random.choice(WORDS) for _ in range(self.limit))
        self.tokens = (await self.post("/tokenize", {"prompt": text}))["tokens"]
        self.asked = [self.greedy(share / (self.args.prompts - 1)) for share in range(self.args.prompts)]
        # The second time, the first one's tokens are cached; what is compressed is then answered from its codes.
        self.alone = [dict([await self.whole(body), await self.whole(body)]) for body in self.asked]
        self.start = time.monotonic()
        await self.sample()
        with HealthProbe(str(self.client.base_url)) as probe:
            await asyncio.gather(*(self.work(number) for number in range(self.args.concurrency)))
        self.faults += probe.faults
        seconds = time.monotonic() - self.start
        left = await self.left_over()
        for chat in self.chats:
            await self.replay(chat)
        pools = {} if self.args.base_url else await self.fill_and_empty()
        await self.sample()
        return self.summary(seconds, left, pools) | probe.summary()

    def stop(self, number: int) -> None:
        """Lets running requests finish; a second signal does not."""
        asyncio.get_running_loop().remove_signal_handler(number)
        self.stopped = True

    # -- clients ---------------------------------------------------------------------------------------------------

    async def work(self, number: int) -> None:
        """One client: requests one after another until there have been enough, or time is up."""
        while self.begun < self.args.requests and not self.stopped:
            if time.monotonic() > self.start + self.args.seconds or len(self.faults) >= MAX_FAULTS:
                break
            if number % 4 and self.begun // TIDE % 2:
                await asyncio.sleep(0.1)
                continue
            self.begun += 1
            if self.begun % max(1, self.args.requests // 40) == 0:
                self.progress(self.begun)
                await self.sample()
            (kind,) = self.random.choices([*WEIGHTS], [*WEIGHTS.values()])
            self.counts[kind] += 1
            try:
                await getattr(self, f"do_{kind.replace(' ', '_')}")()
            except (Lost, httpx.HTTPError, ValueError, KeyError) as error:
                self.faults.append(f"{kind}: {type(error).__name__}: {error}"[:300])

    async def do_whole(self) -> None:
        which = self.random.randrange(len(self.asked))
        self.compare_as_cached(self.alone[which], *await self.whole(self.asked[which]))

    async def do_stream(self) -> None:
        which = self.random.randrange(len(self.asked))
        while (answer := await self.streamed(self.asked[which])) is None:
            self.counts["queue full in a stream"] += 1
            await asyncio.sleep(RETRY_SECONDS)
        self.compare_as_cached(self.alone[which], *answer)

    async def do_hang_up(self) -> None:
        body = self.body(self.prompt(self.random.random(), 1), ignore_eos=True, stream=self.random.random() < 0.5)
        body["max_tokens"] = self.limit - len(body["prompt"])
        try:
            await asyncio.wait_for(self.client.post("/v1/completions", json=body), self.random.random() ** 2)
        except asyncio.TimeoutError:
            self.counts["hung up"] += 1

    async def do_chat(self) -> None:
        turns: list[Turn] = []
        messages: list[dict[str, str]] = []
        for number in range(TURNS):
            said = " ".join(self.random.choices(WORDS, k=self.random.randrange(1, 40)))
            messages = [*messages, {"role": "user", "content": f"Turn {number} {self.random.random()}: {said}"}]
            turns.append(await self.turn(messages))
            self.counts["cached tokens"] += turns[-1].cached
            messages = [*messages, {"role": "assistant", "content": "".join(turns[-1].answer.tokens)}]
        self.chats.append(turns)

    async def replay(self, chat: list[Turn]) -> None:
        """Repeats a chat alone; turns that were computed fresh are again, and the others follow their earlier turn."""
        for turn in chat:
            try:
                again = await (self.turn if turn.cached else self.fresh_turn)(turn.messages)
                self.compare_as_cached({again.cached: again.answer}, turn.cached, turn.answer)
            except (Lost, httpx.HTTPError, ValueError, KeyError) as error:
                self.faults.append(f"replayed chat: {type(error).__name__}: {error}"[:300])

    # -- judgement -------------------------------------------------------------------------------------------------

    def compare_as_cached(self, alone: dict[int, Answer], cached: int, answer: Answer) -> None:
        """Compares an answer with the one that had the same number of cached tokens."""
        if cached in alone:
            self.compare(alone[cached], answer)
        else:
            self.counts["cached otherwise"] += 1

    def compare(self, expected: Answer, answer: Answer) -> None:
        """Counts an answer as the same as expected, as a near-tie, or as wrong."""
        if answer.finish_reason is None or len(answer.tokens) != len(answer.logprobs):
            raise Lost("the answer is not whole")
        verdict, difference = compare(expected, answer, self.args.tolerance)
        self.largest_difference = max(self.largest_difference, difference)
        self.counts[verdict] += 1
        if verdict == "wrong":
            texts = "".join(answer.tokens), "".join(expected.tokens)
            self.faults.append("wrong by {:.4f}: {!r} for {!r}".format(difference, *texts)[:300])

    async def sample(self) -> None:
        """Records the server's resident memory."""
        mib = await self.gauge("process_resident_memory_bytes") / 2**20
        self.memory.append((round(time.monotonic() - self.start), round(mib)))

    async def left_over(self) -> int:
        """Requests that the server still has, after a rest."""
        for _ in range(60):
            left = await self.gauge("shadowkv:num_requests_running") + await self.gauge("shadowkv:num_requests_waiting")
            if not left:
                break
            await asyncio.sleep(0.5)
        return int(left)

    async def fill_and_empty(self) -> dict[str, int]:
        """Sequences that run when every slot is requested at once, and bytes of the KV cache in use when they are gone.

        They leave no room for finished sequences, so whatever is left then has leaked.
        """
        body = self.body([1], max_tokens=FILLING_ANSWER, ignore_eos=True, stream=True)
        lines: list[AsyncIterator[str]] = []
        async with AsyncExitStack() as stack:
            for _ in range(SLOTS):
                response = await stack.enter_async_context(self.open("/v1/completions", body))
                lines.append(response.aiter_lines())
                await anext(lines[-1])  # admitted; the stream lives as long as its iterator
            running = await self.gauge("shadowkv:num_requests_running")
        await self.left_over()
        return {"sequences at once": int(running), "bytes left": int(await self.gauge("shadowkv:kv_cache_used_bytes"))}

    # -- report ----------------------------------------------------------------------------------------------------

    def progress(self, begun: int) -> None:
        passed = time.monotonic() - self.start
        left = passed / begun * (self.args.requests - begun)
        done = f"{begun} of {self.args.requests} requests, {len(self.faults)} faults"
        print(f"{done}, {passed:.0f} s, about {left:.0f} s left", file=sys.stderr, flush=True)

    def summary(self, seconds: float, left: int, pools: dict[str, int]) -> dict[str, Any]:
        """All figures, and whether the run passed."""
        mib = [size for _, size in self.memory]
        early, late = max(mib[: len(mib) // 2 + 1]), mib[-1]
        flat = late <= 1.03 * early + 16
        empty = pools in ({}, {"sequences at once": SLOTS, "bytes left": 0})
        wrong, enough = self.counts["wrong"], self.begun >= self.args.requests
        return {
            "ok": not self.faults and not left and flat and empty and enough,
            "requests": self.begun,
            "seconds": round(seconds, 1),
            "kinds": {kind: self.counts[kind] for kind in WEIGHTS},
            "hung up before the answer": self.counts["hung up"],
            **{name: self.counts[name] for name in ("half requests cut off", "slow readers cut off")},
            "lost": len(self.faults) - wrong,
            "wrong": wrong,
            "same": self.counts["same"],
            "near-ties": self.counts["near-ties"],
            "largest difference in log-probability": self.largest_difference,
            "tolerance": self.args.tolerance,
            "queue full": self.counts["queue full"],
            "queue full in a stream": self.counts["queue full in a stream"],
            "chat tokens cached": self.counts["cached tokens"],
            "cached otherwise, not compared": self.counts["cached otherwise"],
            "requests left over": left,
            "KV cache": pools,
            "memory": {"first MiB": mib[0], "half-way MiB": early, "last MiB": late, "flat": flat},
            "memory over time, s and MiB": self.memory,
            "server": self.args.base_url or {**SERVER, "kv": self.args.kv, "max_body_mib": self.args.max_body_mib},
        }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", help="server on 127.0.0.1 (default: starts its own)")
    parser.add_argument("--kv", default=SERVER["kv"], help="policy of its own server (default: %(default)s)")
    text = "longest body that the server takes (default: %(default)s)"
    parser.add_argument("--max-body-mib", type=float, default=1.0, help=text)
    parser.add_argument("--requests", type=int, default=10_000, help="(default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=32, help="clients (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=64, help="different greedy requests (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3600, help="stop after (default: %(default)s)")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of log-probabilities (default: %(default)s)")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the summary there, as JSON")
    args = parser.parse_args(argv)
    if args.base_url and urlsplit(args.base_url).hostname != "127.0.0.1":
        parser.error("--base-url must be on 127.0.0.1: this is a load test")
    if min(args.requests, args.concurrency, args.prompts - 1, args.seconds, args.tolerance) <= 0:
        parser.error("numbers must be positive, and --prompts at least 2")
    return args


def main() -> int:
    """Command line; returns the exit status."""
    args = parse()

    async def run(url: str) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {args.api_key}"}
        limits = httpx.Limits(max_connections=args.concurrency + SLOTS)
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=300, limits=limits) as client:
            soak = Soak(client, args)
            summary = await soak.run()
        for fault in soak.faults[:20]:
            print(fault)
        return summary

    with nullcontext(args.base_url) if args.base_url else own_server(args.kv, args.max_body_mib) as url:
        summary = asyncio.run(run(url))
    for name, value in summary.items():
        print(f"{name:38} {value}")
    if args.out:
        args.out.write_text(json.dumps(provenance() | summary, indent=1) + "\n", encoding="utf-8")
    return 0 if summary["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
