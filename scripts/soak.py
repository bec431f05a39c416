"""Mixed load on a live server of this machine: nothing lost, nothing wrong, nothing left over; stops by itself.

Good requests (whole and streamed, 1 token to the limit, chats of several turns), clients that hang up, and bad bodies,
in random order. Greedy answers must be those that the same prompts got alone before; where two tokens were nearly as
likely, rounding may choose the other one, and that is counted as a near-tie.

    python -m shadowkv.serve --max-model-len 1024 &
    python scripts/soak.py --requests 300
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

NEAR_TIE = 0.1
"""Greedy tokens whose log-probabilities differ by less may change places with the batch's shape."""
ANSWER_TOKENS = 16
WEIGHTS = {"whole": 35, "stream": 30, "hang up": 13, "bad": 12, "chat": 10}
TURNS = 3
WORDS = ("the", "of", "rain", "stone", "key", "seven", "river", "old", "paper", "green", "music", "window", "glass")


class Lost(Exception):
    """A good request without a good answer, or a bad one that got one."""


@dataclass
class Answer:
    """What one greedy request said."""

    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[str, float]] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, choice: dict[str, Any]) -> None:
        """Takes in a choice, or a part of it."""
        part = choice.get("logprobs") or {"tokens": [], "token_logprobs": [], "top_logprobs": []}
        self.tokens += part["tokens"]
        self.logprobs += part["token_logprobs"]
        self.top += part["top_logprobs"]
        self.finish_reason = choice["finish_reason"] or self.finish_reason


@dataclass
class Soak:
    """One run.

    Args:
        client: talks to the server.
        args: the command line's.
    """

    client: httpx.AsyncClient
    args: argparse.Namespace
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    drift: float = 0.0
    begun: int = 0

    async def run(self) -> bool:
        """Prints a table; whether all was well."""
        self.random = random.Random(self.args.seed)
        model = (await self.client.get("/v1/models")).json()["data"][0]
        self.limit: int = model["max_model_len"]
        text = " ".join(self.random.choice(WORDS) for _ in range(self.limit))
        self.tokens: list[int] = (await self.client.post("/tokenize", json={"prompt": text})).json()["tokens"]
        self.prompts = [self.prompt(share / (self.args.prompts - 1)) for share in range(self.args.prompts)]
        self.alone = [await self.whole(prompt) for prompt in self.prompts]
        start = time.monotonic()
        await self.sample()
        workers = [self.work(start + self.args.seconds) for _ in range(self.args.concurrency)]
        await asyncio.gather(*workers)
        seconds = time.monotonic() - start
        left = await self.left_over()
        await self.sample()
        return self.report(seconds, left)

    def prompt(self, share: float) -> list[int]:
        """Token ids of a prompt, of 1 token (0) to as many as the context has room for (1)."""
        longest = min(self.limit - ANSWER_TOKENS, len(self.tokens))
        length = max(1, round(longest**share))
        begin = self.random.randrange(len(self.tokens) - length + 1)
        return self.tokens[begin : begin + length]

    async def work(self, deadline: float) -> None:
        """One client: requests one after another until there have been enough, or time is up."""
        while self.begun < self.args.requests and time.monotonic() < deadline:
            self.begun += 1
            if self.begun % max(1, self.args.requests // 20) == 0:
                print(f"{self.begun} requests, {len(self.faults)} faults", file=sys.stderr, flush=True)
                await self.sample()
            (kind,) = self.random.choices([*WEIGHTS], [*WEIGHTS.values()])
            self.counts[kind] += 1
            try:
                await getattr(self, f"do_{kind.replace(' ', '_')}")()
            except (Lost, httpx.HTTPError, ValueError, KeyError) as error:
                self.faults.append(f"{kind}: {type(error).__name__}: {error}"[:300])

    async def do_whole(self) -> None:
        which = self.random.randrange(len(self.prompts))
        self.compare(which, await self.whole(self.prompts[which]))

    async def do_stream(self) -> None:
        which = self.random.randrange(len(self.prompts))
        answer = Answer()
        async with self.stream(self.body(self.prompts[which])) as response:
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    break
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise Lost(event["error"]["message"])
                    answer.add(event["choices"][0])
            else:
                raise Lost("the stream ended without [DONE]")
        self.compare(which, answer)

    async def do_hang_up(self) -> None:
        body = self.body(self.prompt(self.random.random()), ignore_eos=True, stream=self.random.random() < 0.5)
        body["max_tokens"] = max(1, self.limit - len(body["prompt"]))
        try:
            timeout = self.random.uniform(0.01, 2)
            await asyncio.wait_for(self.client.post("/v1/completions", json=body), timeout)
        except asyncio.TimeoutError:
            pass

    async def do_bad(self) -> None:
        good = json.dumps(self.body([1, 2, 3]))
        bodies: list[tuple[str | bytes, tuple[int, ...]]] = [
            (good[: self.random.randrange(len(good))], (400,)),
            (self.random.randbytes(self.random.randrange(200)), (400,)),
            ("[" * self.random.randrange(1, 10_000), (400,)),
            (json.dumps({**self.body([1]), "model": "no such model"}), (404,)),
            *((json.dumps({**self.body([1]), name: value}), (400,)) for name, value in BAD_PARAMETERS),
            (json.dumps(self.body([1] * (self.limit + self.random.randrange(1, 50)))), (400,)),
            (json.dumps(self.body([2**31])), (400,)),
        ]
        content, status = self.random.choice(bodies)
        path = self.random.choice(["/v1/completions", "/v1/chat/completions"])
        response = await self.client.post(path, content=content, headers={"Content-Type": "application/json"})
        error = response.json()["error"]
        if response.status_code not in (*status, 400) or set(error) != {"message", "type", "param", "code"}:
            raise Lost(f"{response.status_code} for {content[:80]!r}: {error}")

    async def do_chat(self) -> None:
        messages: list[dict[str, str]] = []
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"Word {self.random.randrange(100)} please, turn {turn}."})
            options = {"max_tokens": ANSWER_TOKENS, "temperature": 0.7, "seed": 1}
            answer = await self.post("/v1/chat/completions", {"messages": messages, **options})
            if answer["usage"]["completion_tokens"] < 1:
                raise Lost("no tokens")
            self.counts["cached tokens"] += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})

    def body(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        """A greedy request."""
        return {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "logprobs": 2, **more}

    async def whole(self, prompt: list[int]) -> Answer:
        """The answer to one prompt, in one piece."""
        answer = Answer()
        answer.add((await self.post("/v1/completions", self.body(prompt)))["choices"][0])
        return answer

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """An answer's body; a full queue is asked again."""
        while True:
            response = await self.client.post(path, json=body)
            if response.status_code == 503 and "retry-after" in response.headers:
                self.counts["retries"] += 1
                await asyncio.sleep(float(response.headers["retry-after"]))
                continue
            if response.status_code != 200:
                raise Lost(f"{response.status_code}: {response.text[:200]}")
            return response.json()

    def stream(self, body: dict[str, Any]) -> Any:
        """A streamed answer, as a context."""
        return self.client.stream("POST", "/v1/completions", json={**body, "stream": True})

    def compare(self, which: int, answer: Answer) -> None:
        """Counts an answer as the same as alone, as a near-tie, or as wrong."""
        alone = self.alone[which]
        if answer.finish_reason is None or len(answer.tokens) != len(answer.logprobs):
            raise Lost("the answer is not whole")
        for one, other, mine, theirs in zip(alone.tokens, answer.tokens, alone.logprobs, answer.logprobs, strict=False):
            if one != other:
                break
            self.drift = max(self.drift, abs(mine - theirs))
        if answer.tokens == alone.tokens:
            self.counts["same"] += 1
            return
        first = next((i for i, pair in enumerate(zip(alone.tokens, answer.tokens)) if pair[0] != pair[1]), None)
        gap = float("inf") if first is None else alone.logprobs[first] - alone.top[first].get(answer.tokens[first], -99)
        if gap < NEAR_TIE:
            self.counts["near-ties"] += 1
            return
        self.counts["wrong"] += 1
        where = f"prompt of {len(self.prompts[which])} tokens, at {first} by {gap:.3f}"
        self.faults.append(f"wrong: {where}: {''.join(answer.tokens)!r} for {''.join(alone.tokens)!r}"[:300])

    async def gauge(self, name: str) -> float:
        """A number from /metrics."""
        page = (await self.client.get("/metrics")).text
        found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
        if found is None:
            raise SystemExit(f"/metrics has no {name}")
        return float(found[1])

    async def sample(self) -> None:
        self.memory.append(await self.gauge("process_resident_memory_bytes") / 2**20)

    async def left_over(self) -> float:
        """Requests that the server still has, after a while of rest."""
        for _ in range(60):
            left = await self.gauge("shadowkv:num_requests_running") + await self.gauge("shadowkv:num_requests_waiting")
            if not left:
                break
            await asyncio.sleep(0.5)
        return left

    def report(self, seconds: float, left: float) -> bool:
        lost = len(self.faults) - self.counts["wrong"]
        early, late = max(self.memory[: len(self.memory) // 2 + 1]), self.memory[-1]
        flat = late <= 1.03 * early + 16
        kinds = ", ".join(f"{self.counts[kind]} {kind}" for kind in WEIGHTS)
        rows = (
            ("requests", f"{self.begun} in {seconds:.0f} s ({kinds})"),
            ("lost", lost),
            ("wrong", self.counts["wrong"]),
            ("same as alone", f"{self.counts['same']}, near-ties {self.counts['near-ties']}"),
            ("largest difference", f"{self.drift:.4f} in log-probability"),
            ("chat tokens cached", self.counts["cached tokens"]),
            ("queue full", f"{self.counts['retries']} times"),
            ("left over", f"{left:g} requests"),
            ("memory, MiB", f"{self.memory[0]:.0f} first, {early:.0f} half-way, {late:.0f} last, flat: {flat}"),
        )
        for name, value in rows:
            print(f"{name:20} {value}")
        for fault in self.faults[:20]:
            print(fault)
        return not self.faults and not left and flat and self.begun >= self.args.requests


BAD_PARAMETERS: tuple[tuple[str, Any], ...] = (
    ("temperature", "hot"),
    ("max_tokens", -1),
    ("max_tokens", 10**9),
    ("n", 0),
    ("stop", 5),
    ("top_p", 2),
    ("logit_bias", {"x": 1}),
    ("logprobs", 1000),
    ("prompt", {}),
    ("no_such_parameter", True),
)


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="(default: %(default)s)")
    parser.add_argument("--requests", type=int, default=10_000, help="(default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=24, help="clients (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=24, help="different greedy prompts (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3600, help="stop after (default: %(default)s)")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if urlsplit(args.base_url).hostname != "127.0.0.1":
        parser.error("--base-url must be on 127.0.0.1: this is a load test")
    if min(args.requests, args.concurrency, args.prompts - 1, args.seconds) <= 0:
        parser.error("--requests, --concurrency and --seconds must be positive, --prompts at least 2")

    async def run() -> bool:
        headers = {"Authorization": f"Bearer {args.api_key}"}
        limits = httpx.Limits(max_connections=args.concurrency + 4)
        async with httpx.AsyncClient(base_url=args.base_url, headers=headers, timeout=600, limits=limits) as client:
            return await Soak(client, args).run()

    return 0 if asyncio.run(run()) else 1


if __name__ == "__main__":
    sys.exit(main())
