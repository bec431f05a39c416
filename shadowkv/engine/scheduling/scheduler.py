"""Which requests run: admission of waiting requests, in the order of ``WaitingQueue``, against both memory budgets.

A request is admitted only if every page it may need up to its last token is free, so running requests cannot run out.
A place and a little memory are only for tenants for whom nothing is computed yet.
Short prompts need not wait for long ones, and take nothing from them. Requests that share a prefix wait for the first
of them to compute it, where that is less than all of them would compute.
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
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.prefix_cache.cache import PrefixCache
from shadowkv.prefix_cache.matches import Match, Prompt
from shadowkv.prefix_cache.page_names import common_pages
from shadowkv.wording import counted

logger = logging.getLogger(__name__)

SPARE_TOKENS = 1024
"""A short question and its answer, for which there is room beside the requests of other tenants."""

MAX_REFUSED = 32
"""Newcomers that are looked at although there was no room for them."""

MAX_ON_THEIR_WAY = 32
"""Waiting requests that others may pass because part of them is still being read from the disk: each is looked at in
every step."""


@dataclass(eq=False)
class Running:
    """A request that owns a sequence, which samples by its seed from then on, whichever request had it before."""

    request: Request
    sequence: CachedSequence
    rules_were_late: bool = False
    """Whether its newest token had to wait for its grammar."""
    prompt_hidden: Tensor | None = None
    """What its prompt is scored from, if that is requested, until its first token is chosen."""

    def __post_init__(self) -> None:
        self.sequence.seed = self.request.seed

    @property
    def new_token_ids(self) -> list[int]:
        """Tokens of its prompt that were not cached."""
        return self.request.prompt_token_ids[self.request.cached_tokens :]


@dataclass(frozen=True, eq=False)
class Leader:
    """A prompt that is being computed, which others may wait for.

    Attributes:
        prompt: None where it is not to be shared.
        tokens: those left to compute.
    """

    prompt: Prompt | None
    tokens: int


@dataclass(frozen=True)
class Attempt:
    """An attempt to admit a request: one that failed for lack of room is not repeated before something has changed."""

    request: Request
    match: Match | None
    left: Blocks
    again: bool
    changes: int


class Sharing:
    """What waiting requests have in common with leaders, computed once for each leader that is queried."""

    def __init__(self, waiting: Sequence[Request]) -> None:
        self._waiting, self._wait = waiting, np.ones(len(waiting), bool)
        self._tokens: dict[Leader, npt.NDArray[np.int64]] = {}

    def admitted(self, number: int) -> None:
        """Records that one of them is no longer waiting."""
        self._wait[number] = False

    def waits(self, number: int, cached: int, leader: Leader) -> bool:
        """Whether a request is to wait for a leader that has more of its prefix than the ``cached`` tokens: where all
        that wait would compute more tokens of that prefix than the leader has left."""
        if leader.prompt is None or _shared(self._waiting[number], leader.prompt) <= cached:
            return False
        if leader not in self._tokens:
            self._tokens[leader] = np.array([_shared(request, leader.prompt) for request in self._waiting], np.int64)
        spared = np.maximum(self._tokens[leader][self._wait] - cached, 0)
        return int(spared.sum()) > leader.tokens


def _shared(request: Request, prompt: Prompt) -> int:
    """Tokens of a request that it need not compute once ``prompt`` has been computed."""
    if request.prompt is None:
        return 0
    return min(
        PAGE * common_pages(request.prompt.pages, prompt.pages), (len(request.prompt_token_ids) - 1) // PAGE * PAGE
    )


class Scheduler:
    """The waiting queue, the running set and the prefix cache.

    Args:
        cache: whose sequences are scheduled.
        max_num_seqs: most requests that run at once; one more does where that is its tenant's only one, in the place of
            a cached sequence.
        max_num_batched_tokens: tokens computed together, of prompts and of sequences that decode; a longer prompt goes
            alone, and so does one of more than a block.
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
        """Memory that requests of tenants that have others leave to those that have none; nothing without a place for
        such a request."""
        if self.cache.total["sequences"] <= self.max_num_seqs:
            return Blocks()
        tokens = min(SPARE_TOKENS, self.cache.max_model_len)
        need = self.cache.demand(tokens, tokens)
        return Blocks({tier: need[tier] for tier in self.cache.layout.paged})

    @property
    def could_admit(self) -> bool:
        """Whether requests are waiting, and none of them was last refused for lack of memory."""
        refused = self._refused
        return bool(self.waiting) and (
            refused is None or all(refused.request is not request for request in self.waiting)
        )

    @property
    def short_tokens_waiting(self) -> int:
        """Tokens of the waiting prompts of up to a block."""
        lengths = (len(request.prompt_token_ids) for request in self.waiting)
        return sum(length for length in lengths if not self.is_long(length))

    @property
    def deferred(self) -> int:
        """Waiting requests for which something is on its way from the disk; may be read from any thread."""
        return self.prefix_cache.deferred

    @property
    def max_concurrency(self) -> float:
        """How many sequences of the model's length the KV cache has room for at once."""
        length, total = self.cache.max_model_len, self.cache.total
        need = self.cache.demand(length, length)
        return min(total[tier] / need[tier] for tier in self.cache.layout.paged if need[tier])

    @property
    def usage(self) -> float:
        """The share of the KV cache, 0 to 1, that requests in flight hold, in the tier where it is largest; may be read
        from any thread. What is kept of others makes room for them, and does not count."""
        total, reachable = self.cache.total, self._reachable()
        return max(0.0, *(1 - reachable[tier] / total[tier] for tier in self.cache.layout.paged if total[tier]))

    def check_memory(self, prompt_tokens: int, max_tokens: int) -> None:
        """Raises RequestError if the cache has no room for a request of this size even when it is empty."""
        need = self.cache.demand(prompt_tokens, prompt_tokens + max(1, max_tokens) - 1)
        if not need.within(self.cache.total):
            raise RequestError(
                f"{counted(prompt_tokens, 'prompt token')} and max_tokens={max_tokens} need {need} "
                f"blocks of the KV cache, which has {self.cache.total}"
            )

    def add(self, request: Request) -> None:
        """Queues a request; what it needs from the disk is read in the meantime."""
        seconds = self._pace.seconds(len(request.prompt_token_ids))
        self.waiting.add(request, seconds if math.isfinite(seconds) else 0.0)
        self._match(request)

    def cancel(self, request_id: str) -> bool:
        """Removes a waiting request from the queue; returns whether it was there."""
        request = next((waiting for waiting in self.waiting if waiting.request_id == request_id), None)
        if request is not None:
            self.waiting.remove(request)
            self._forget_match(request)
        return request is not None

    def _forget_match(self, request: Request) -> None:
        if request.prompt is not None:
            self.prefix_cache.forget(request.prompt)

    def is_long(self, new: int) -> bool:
        """Whether ``new`` tokens of a prompt take more than a block: others may overtake it."""
        return new > BLOCK_TOKENS[self.cache.device.type]

    def admit(
        self, in_flight: Iterable[Leader] = (), most_tokens: float = math.inf, newcomers_only: bool = False
    ) -> list[Running]:
        """The waiting requests to prefill together next, with their sequences.

        Args:
            in_flight: requests whose prefill is paused. Then long prompts are passed over, as far as there is room for
                them and the others, and the others have at most a block.
            most_tokens: a further limit on prompts that are packed; one may have more by itself.
            newcomers_only: whether to admit only requests of tenants for whom nothing is computed.
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
                newcomers_only = True  # what is left to short ones of them does not keep it waiting
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
        """Whether a request is to leave memory to short requests of newcomers: where anything else runs or is computed,
        and it is not one of them."""
        is_one = newcomer and request.capacity <= SPARE_TOKENS
        return bool(self.running or in_flight) and self.waiting.is_shared(request) and not is_one

    def _match(self, request: Request) -> Match | None:
        """What is cached of a prompt."""
        return self.prefix_cache.look_up(request.prompt) if request.prompt and _looks_up(request) else None

    def computed(self, done: Iterable[Running]) -> None:
        """Requests whose prefill has ended run from now on, and can be forked."""
        for running in done:
            self.running.append(running)
            if running.request.prompt is not None:
                self.prefix_cache.computed(running.sequence, running.request.prompt)

    def finish(self, running: Running, keep: bool) -> None:
        """Ends a request; its sequence stays in the prefix cache if ``keep``."""
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
        """A sequence for a request, if there is room for it and for what is to be ``left``; where what is cached of it
        cannot be continued, one for all of its tokens, if those may be computed ``again``."""
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
                logger.warning("a cached prompt cannot be restored and is computed: %s", error)
                return self._reserve(request, None, left, again)
            request.cached_tokens = match.tokens
            return sequence
        need = cache.demand(start, request.capacity)
        # Nothing is evicted for a request that would have to wait anyway.
        if not (need + left).within(self._reachable()):
            return None
        if not self._make_room(need):
            return None
        request.cached_tokens = 0
        return cache.allocate(start, request.capacity)

    def _make_room(self, need: Blocks, spare: CachedSequence | None = None) -> bool:
        """Evicts kept sequences other than ``spare`` until there is room, if that can be reached."""
        while not need.within(self.cache.free):
            if not self.prefix_cache.evict(spare):
                return False
        return True

    def _reachable(self, spare: CachedSequence | None = None) -> Blocks:
        """What is free, or would be after evicting all kept sequences other than ``spare``."""
        return self.cache.free + self.prefix_cache.blocks(spare)


def _looks_up(request: Request) -> bool:
    """Whether cached parts of a prompt are requested and allowed: scores of a prompt require computing all of it."""
    return request.prompt is not None and request.looked_up and request.params.prompt_logprobs is None
