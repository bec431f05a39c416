"""The scheduler: admits waiting requests in the order of ``WaitingQueue``, if the memory of every tier suffices.

A request is admitted only if all pages that it can need up to its last token are free. So running requests never run
out of pages. One sequence and a little memory are reserved for newcomers: tenants of which no request runs or is
prefilled. Short prompts overtake long ones without taking their memory. Requests that share a prefix wait for the first
of them to compute it, if the others together would compute more tokens of the prefix than the first has left to
compute.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shadowkv.engine.execution.forward import BLOCK_TOKENS
from shadowkv.engine.request import Request, RequestError
from shadowkv.engine.scheduling.pacing import Pace
from shadowkv.engine.scheduling.waiting_queue import WaitingQueue
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.prefix_cache.matches import Match, Prompt
from shadowkv.prefix_cache.page_hashes import common_pages
from shadowkv.prefix_cache.prefix_cache import PrefixCache
from shadowkv.wording import counted

logger = logging.getLogger(__name__)

SPARE_TOKENS = 1024
"""Number of tokens of a short question and its answer. Memory for this many tokens is reserved for newcomers."""

MAX_REFUSED = 32
"""An admission stops when this many requests of newcomers did not fit, or when any other request did not fit."""

MAX_ON_THEIR_WAY = 32
"""Maximum number of requests that wait for a prefix from the disk while other requests overtake them. It is limited
because every step checks each of them."""


@dataclass(eq=False)
class Running:
    """A request that owns a sequence. Sampled attention of the sequence then uses the request's seed."""

    request: Request
    sequence: CachedSequence
    rules_were_late: bool = False
    """Whether the request's newest token had to wait for its grammar."""
    prompt_hidden: Tensor | None = None
    """Final hidden states [tokens, D] of the prompt, for ``prompt_logprobs``. Set until the first token is chosen."""

    def __post_init__(self) -> None:
        self.sequence.seed = self.request.seed

    @property
    def new_token_ids(self) -> list[int]:
        """Tokens of the request's prompt that were not cached."""
        return self.request.prompt_token_ids[self.request.cached_tokens :]


@dataclass(frozen=True, eq=False)
class Leader:
    """A prompt that is being computed, for which requests with the same prefix can wait.

    Attributes:
        prompt: the prompt; None if the request does not use the prefix cache.
        tokens: number of tokens left to compute.
    """

    prompt: Prompt | None
    tokens: int


@dataclass(frozen=True)
class Attempt:
    """An attempt to admit a request. An attempt that failed for lack of memory is not repeated until a field changes.

    Attributes:
        match: the cached prefix; None if nothing is cached.
        left: blocks that must stay free after the admission.
        again: whether the whole prompt can be computed if its cached prefix cannot be continued.
        changes: the prefix cache's count of changes.
    """

    request: Request
    match: Match | None
    left: Blocks
    again: bool
    changes: int


class Sharing:
    """The lengths of the prefixes that waiting requests share with leaders. They are computed once per leader, when
    first needed."""

    def __init__(self, waiting: Sequence[Request]) -> None:
        self._waiting, self._wait = waiting, np.ones(len(waiting), bool)
        self._tokens: dict[Leader, npt.NDArray[np.int64]] = {}

    def admitted(self, number: int) -> None:
        """Records that the waiting request at index ``number`` has been admitted."""
        self._wait[number] = False

    def waits(self, number: int, cached: int, leader: Leader) -> bool:
        """Whether a request must wait for a leader.

        It must if both are true: it shares more tokens with the leader than the ``cached`` ones; and all waiting
        requests together would compute more tokens of the leader's prompt than the leader has left to compute.
        """
        if leader.prompt is None or _shared(self._waiting[number], leader.prompt) <= cached:
            return False
        if leader not in self._tokens:
            self._tokens[leader] = np.array([_shared(request, leader.prompt) for request in self._waiting], np.int64)
        spared = np.maximum(self._tokens[leader][self._wait] - cached, 0)
        return int(spared.sum()) > leader.tokens


def _shared(request: Request, prompt: Prompt) -> int:
    """Tokens that a request need not compute once ``prompt`` has been computed."""
    if request.prompt is None:
        return 0
    return min(
        PAGE * common_pages(request.prompt.pages, prompt.pages), (len(request.prompt_token_ids) - 1) // PAGE * PAGE
    )


class Scheduler:
    """The waiting queue, the running set and the prefix cache.

    Args:
        cache: the cache that allocates the sequences.
        max_num_seqs: maximum number of requests that run at once. A newcomer's request can run beyond this limit, in
            the slot of a cached sequence.
        max_num_batched_tokens: maximum number of tokens of prompts and decode rows in one pass. A prompt with more
            tokens, or with more than a block, is computed alone.
    """

    def __init__(
        self,
        cache: KVCache,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_cache: PrefixCache | None = None,
        policy: str = "fair",
        pace: Pace | None = None,
    ) -> None:
        self.cache, self._pace = cache, pace or Pace()
        self.prefix_cache = PrefixCache(cache) if prefix_cache is None else prefix_cache
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting = WaitingQueue(policy)
        self.running: list[Running] = []
        self._refused: Attempt | None = None

    @property
    def _spare(self) -> Blocks:
        """Memory that is reserved for newcomers. It is empty if the cache has no sequence to reserve."""
        if self.cache.total["sequences"] <= self.max_num_seqs:
            return Blocks()
        tokens = min(SPARE_TOKENS, self.cache.max_model_len)
        need = self.cache.demand(tokens, tokens)
        return Blocks({tier: need[tier] for tier in self.cache.layout.paged})

    @property
    def could_admit(self) -> bool:
        """Whether a waiting request might be admitted. False if no request waits, or if the request that was last
        refused for lack of memory still waits."""
        refused = self._refused
        return bool(self.waiting) and (
            refused is None or all(refused.request is not request for request in self.waiting)
        )

    @property
    def short_tokens_waiting(self) -> int:
        """Total number of tokens of the waiting prompts that fit into a block."""
        lengths = (len(request.prompt_token_ids) for request in self.waiting)
        return sum(length for length in lengths if not self.is_long(length))

    @property
    def deferred(self) -> int:
        """Number of waiting requests whose prefix is being read from the disk. Any thread can read it."""
        return self.prefix_cache.deferred

    @property
    def max_concurrency(self) -> float:
        """Number of sequences of the model's maximum length that fit into the KV cache at once."""
        length, total = self.cache.max_model_len, self.cache.total
        need = self.cache.demand(length, length)
        return min(total[tier] / need[tier] for tier in self.cache.layout.paged if need[tier])

    @property
    def usage(self) -> float:
        """The share of the KV cache that requests in flight hold, 0 to 1, in the fullest tier. Any thread can read it.
        Finished sequences in the prefix cache do not count, because they can be evicted."""
        total, reachable = self.cache.total, self._reachable()
        return max(0.0, *(1 - reachable[tier] / total[tier] for tier in self.cache.layout.paged if total[tier]))

    def check_memory(self, prompt_tokens: int, max_tokens: int) -> None:
        """Raises RequestError if a request of this size does not fit into the empty cache."""
        need = self.cache.demand(prompt_tokens, prompt_tokens + max(1, max_tokens) - 1)
        if not need.within(self.cache.total):
            raise RequestError(
                f"{counted(prompt_tokens, 'prompt token')} and max_tokens={max_tokens} need {need} "
                f"blocks of the KV cache, which has {self.cache.total}"
            )

    def add(self, request: Request) -> None:
        """Queues a request. If its cached prefix is on the disk, starts to read the prefix."""
        seconds = self._pace.seconds(len(request.prompt_token_ids))
        self.waiting.add(request, seconds if math.isfinite(seconds) else 0.0)
        self._match(request)

    def cancel(self, request_id: str) -> bool:
        """Removes a waiting request from the queue. Returns False if it was not there."""
        request = next((waiting for waiting in self.waiting if waiting.request_id == request_id), None)
        if request is not None:
            self.waiting.remove(request)
            self._forget_match(request)
        return request is not None

    def _forget_match(self, request: Request) -> None:
        if request.prompt is not None:
            self.prefix_cache.forget(request.prompt)

    def is_long(self, new: int) -> bool:
        """Whether ``new`` tokens of a prompt are more than a block. Shorter prompts can overtake such a prompt."""
        return new > BLOCK_TOKENS[self.cache.device.type]

    def admit(
        self, in_flight: Iterable[Leader] = (), most_tokens: float = math.inf, newcomers_only: bool = False
    ) -> list[Running]:
        """Admits the waiting requests that are prefilled together next, and allocates their sequences.

        Args:
            in_flight: prompts whose prefill is paused. If there are any, long prompts are passed over, memory for the
                passed prompts stays free, and the admitted prompts have at most a block of tokens together.
            most_tokens: maximum number of new tokens of several prompts that are packed. A single prompt can have more.
            newcomers_only: whether to admit only newcomers' requests.
        """
        admitted: list[Running] = []
        leaders = list(in_flight)
        beside, passed, tokens, on_their_way = len(leaders), Blocks(), 0, 0
        waiting, refused = self.waiting.ordered(), 0
        newcomers = self.waiting.newcomers.copy()
        sharing = Sharing(waiting)
        limit = min(most_tokens, self.max_num_batched_tokens - len(self.running))
        if beside:
            limit = min(limit, BLOCK_TOKENS[self.cache.device.type])
        for number, request in enumerate(waiting):
            newcomer = request.tenant in newcomers
            if newcomers_only and not newcomer:
                break
            if len(self.running) + beside + len(admitted) + passed["sequences"] >= self.max_num_seqs + newcomer:
                break
            length = len(request.prompt_token_ids)
            if beside and request.passed == self.prefix_cache.version:
                passed += self.cache.demand(length, request.capacity)
                continue
            if request.prompt is not None and self.prefix_cache.opening:
                continue
            match = self._match(request)
            if match and not match.ready:
                on_their_way += 1
                if on_their_way == MAX_ON_THEIR_WAY:
                    break
                continue
            new = length - (match.tokens if match else 0)
            if beside and self.is_long(new):
                request.passed = self.prefix_cache.version
                passed += self.cache.demand(length, request.capacity)
                continue
            if admitted and (tokens + new > limit or self.is_long(new)):
                break
            if _looks_up(request) and any(sharing.waits(number, length - new, leader) for leader in leaders):
                continue
            left = passed + self._spare if self._leaves_room(request, newcomer, leaders) else passed
            attempt = Attempt(request, match, left, not beside and not admitted, self.prefix_cache.changes)
            sequence = None if attempt == self._refused else self._reserve(request, match, left, attempt.again)
            if sequence is None:
                self._refused = attempt
                refused += 1
                if not newcomer or refused == MAX_REFUSED:
                    break
                newcomers_only = True  # their shorter requests may fit into the reserved memory
                continue
            new = length - request.cached_tokens
            self.waiting.start(request, new)
            newcomers.discard(request.tenant)
            self._forget_match(request)
            sharing.admitted(number)
            admitted.append(Running(request, sequence))
            tokens += new
            leaders.append(Leader(request.prompt, new))
            if self.is_long(new):
                break
        return admitted

    def _leaves_room(self, request: Request, newcomer: bool, in_flight: list[Leader]) -> bool:
        """Whether a request must leave the reserved memory free. It must if anything else runs or is prefilled, unless
        the request is a short one of a newcomer or the fair order does not apply to it."""
        is_one = newcomer and request.capacity <= SPARE_TOKENS
        return bool(self.running or in_flight) and self.waiting.is_shared(request) and not is_one

    def _match(self, request: Request) -> Match | None:
        """Looks up the cached prefix of a prompt. Returns None if nothing is cached, or if the request may not use
        it."""
        return self.prefix_cache.look_up(request.prompt) if request.prompt and _looks_up(request) else None

    def computed(self, done: Iterable[Running]) -> None:
        """Adds requests whose prefill has ended to the running set. Their sequences can be forked from then on."""
        for running in done:
            self.running.append(running)
            if running.request.prompt is not None:
                self.prefix_cache.computed(running.sequence, running.request.prompt)

    def finish(self, running: Running, keep: bool) -> None:
        """Ends a request. With ``keep`` its sequence stays in the prefix cache."""
        if running in self.running:
            self.running.remove(running)
        self.waiting.end(running.request)
        if running.request.constraint is not None:
            running.request.constraint.close()
        prompt, sequence = running.request.prompt, running.sequence
        if not keep or prompt is None:
            self.prefix_cache.release(sequence)
            return
        tokens = running.request.token_ids[: sequence.length]
        self.prefix_cache.keep(sequence, Prompt(tokens, prompt.pages.extend_to(tokens)))

    def _reserve(self, request: Request, match: Match | None, left: Blocks, again: bool) -> CachedSequence | None:
        """Allocates a sequence for a request. Returns None if it does not fit while ``left`` blocks stay free.

        The sequence continues the cached prefix ``match``. The whole prompt is computed instead if the prefix cannot be
        restored, or if the sequence does not fit and ``again`` is True.
        """
        start, cache, prefix_cache = len(request.prompt_token_ids), self.cache, self.prefix_cache
        if match:
            need, spare = prefix_cache.growth(match, start, request.capacity), match.sequence
            if not (need + left).within(self._reachable(spare)):
                return self._reserve(request, None, left, again) if again else None
            if not self._make_room(need, spare):
                return None
            try:
                sequence = prefix_cache.take(match, start, request.capacity)
            except torch.AcceleratorError:
                raise
            except (RuntimeError, ValueError, MemoryError) as error:  # includes OutOfBlocks
                logger.warning("a cached prompt cannot be restored and is computed again: %s", error)
                return self._reserve(request, None, left, again)
            request.cached_tokens = match.tokens
            return sequence
        need = cache.demand(start, request.capacity)
        # Evict nothing for a request that would have to wait anyway.
        if not (need + left).within(self._reachable()):
            return None
        if not self._make_room(need):
            return None
        request.cached_tokens = 0
        return cache.allocate(start, request.capacity, request.prompt is not None)

    def _make_room(self, need: Blocks, spare: CachedSequence | None = None) -> bool:
        """Evicts cached sequences other than ``spare`` until ``need`` is free. Returns False if that is impossible."""
        while not need.within(self.cache.free):
            if not self.prefix_cache.evict(spare):
                return False
        return True

    def _reachable(self, spare: CachedSequence | None = None) -> Blocks:
        """Blocks that would be free after the eviction of all cached sequences other than ``spare``."""
        return self.cache.free + self.prefix_cache.blocks(spare)


def _looks_up(request: Request) -> bool:
    """Whether a request uses the prefix cache. With ``prompt_logprobs`` it does not, because all tokens of the prompt
    must be computed."""
    return request.prompt is not None and request.looked_up and request.params.prompt_logprobs is None
