"""Compares the policies of ``--eviction`` on made-up traces of chats, without a model: the share of prompt tokens that
each tier provides.

The scheduler, the prefix cache and its tiers are the engine's. The KV cache has a few bytes per token, and no attention
is computed. Every chat starts with the same system prompt and a document. The popularity of documents follows Zipf's
law. A chat has up to ``turns`` turns, and all numbers of turns are equally likely. Chats arrive at random times. A
turn's prompt is the chat so far, including the last answer, and a question.

    python -m benchmarks.prefix_cache.eviction_replay --out results/eviction_replay.csv
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.sweeps.rows import append, write
from shadowkv.engine.request import Request
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.engine.scheduling.scheduler import Scheduler
from shadowkv.kvcache.case import choose_ops
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.ops.apply_rope.tables import RopeConfig
from shadowkv.prefix_cache.eviction import POLICIES, Eviction
from shadowkv.prefix_cache.host import HostTier, Mover
from shadowkv.prefix_cache.page_hashes import PageHashes, origin
from shadowkv.prefix_cache.prefix_cache import PrefixCache, Prompt

SYSTEM, SHORTEST, LONGEST, TURN = 8, 16, 64, (1, 8)
"""Pages of the system prompt, of a document (from, to), and of a question with the preceding answer."""

THINKING = 30.0
"""Mean seconds between the turns of a chat."""

SLOTS = 8
"""Number of sequences that the device keeps."""

COLUMNS = ("policy", "seed", "turns", "requests_per_s", "host_share", "hit_rate_device", "hit_rate_host")


@dataclass(frozen=True)
class Trace:
    """The requests of made-up chats.

    Attributes:
        turns: maximum number of turns of a chat.
        rate: requests per second.
    """

    seed: int
    requests: int
    documents: int
    turns: int
    rate: float

    def __iter__(self) -> Iterator[tuple[float, list[int]]]:
        """Yields the time of each request in seconds and its prompt, in order of time."""
        draw = random.Random(self.seed)
        system = _tokens(draw, SYSTEM)
        documents = [_tokens(draw, draw.randint(SHORTEST, LONGEST)) for _ in range(self.documents)]
        popular = [1 / rank for rank in range(1, self.documents + 1)]
        numbers, chats = itertools.count(), list[tuple[float, int, int, list[int]]]()
        coming, mean_turns = 0.0, (1 + self.turns) / 2
        for _ in range(self.requests):
            if not chats or coming < chats[0][0]:
                (document,) = draw.choices(documents, popular)
                heapq.heappush(chats, (coming, next(numbers), draw.randint(1, self.turns), system + document))
                coming += draw.expovariate(self.rate / mean_turns)
            now, chat, left, history = heapq.heappop(chats)
            history = history + _tokens(draw, draw.randint(*TURN))
            yield now, history
            if left > 1:
                heapq.heappush(chats, (now + draw.expovariate(1 / THINKING), chat, left - 1, history))

    @property
    def document_tokens(self) -> int:
        """Expected number of tokens of all documents."""
        return self.documents * PAGE * (SHORTEST + LONGEST) // 2


def _tokens(draw: random.Random, pages: int) -> list[int]:
    return draw.choices(range(2**31), k=pages * PAGE)


def replay(policy: str, trace: Trace, host_share: float) -> dict[str, float]:
    """Returns the hit rate of each tier, as a share of the prompt tokens. The share ``host_share`` of the documents'
    tokens fits into host memory."""
    longest = PAGE * (SYSTEM + LONGEST + trace.turns * TURN[1])
    shape = ModelShape(num_layers=1, num_query_heads=1, num_kv_heads=1, head_dim=2)
    layout, rope = Layout(preset("full"), shape, torch.float32, longest), RopeConfig(head_dim=2, theta=10000.0)
    cache = KVCache(
        layout,
        rope,
        slots=SLOTS + 1,
        memory=Blocks(device=(SLOTS + 1) * longest // PAGE + 1, host=0),
        ops=choose_ops(layout, rope, "cpu"),
    )
    clock = SimpleNamespace(seconds=0.0)
    page_bytes = cache.layout.snapshot_layer_bytes(longest) * PAGE // longest
    host = HostTier(int(host_share * trace.document_tokens) // PAGE * page_bytes, torch.device("cpu"), page_bytes)
    prefixes = PrefixCache(cache, Mover(cache, host), eviction=Eviction(policy, lambda: clock.seconds))
    scheduler, base, prompt_tokens = Scheduler(cache, 1, longest, prefixes), origin(40 * "0"), 0
    for number, (clock.seconds, tokens) in enumerate(trace):
        prompt = Prompt(tokens, PageHashes(base).extend_to(tokens))
        scheduler.add(Request(str(number), tokens, SamplingParams(max_tokens=1), 1, 0, prompt=prompt))
        (running,) = scheduler.admit()
        new = len(tokens) - running.request.cached_tokens
        cache.end_prefill(cache.prefill_batch([(running.sequence, new)]))
        scheduler.computed([running])
        scheduler.finish(running, keep=True)
        while prefixes.busy:
            prefixes.advance(idle=False)
        prompt_tokens += len(tokens)
    return {f"hit_rate_{tier}": prefixes.stats()[tier].hit_tokens / prompt_tokens for tier in ("device", "host")}


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--requests", type=int, default=1000, help="of a trace (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 8], help="of a chat, at the most")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 1.0, 10.0], help="requests a second")
    parser.add_argument(
        "--host-shares", type=float, nargs="+", default=[0.125, 0.25, 0.5], help="of the documents' tokens"
    )
    parser.add_argument("--out", type=Path, required=True, help="CSV file")
    args = parser.parse_args(argv)
    write(args.out, COLUMNS)
    for turns, rate, share in itertools.product(args.turns, args.rates, args.host_shares):
        for seed, policy in itertools.product(range(args.seeds), POLICIES):
            trace = Trace(seed, args.requests, args.documents, turns, rate)
            rates = {name: round(value, 4) for name, value in replay(policy, trace, share).items()}
            row = {"policy": policy, "seed": seed, "turns": turns, "requests_per_s": rate, "host_share": share}
            append(args.out, COLUMNS, [row | rates])
    return 0


if __name__ == "__main__":
    sys.exit(main())
