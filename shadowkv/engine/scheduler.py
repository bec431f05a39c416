"""Who runs: admission of waiting requests, in order of arrival, against both memory budgets.

A request is admitted only if every page it may need to its last token is free, so nothing that runs can run out. Short
prompts need not wait for long ones, and take nothing from them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from shadowkv.engine.finished import FinishedSequences
from shadowkv.engine.prefill import BLOCK_TOKENS
from shadowkv.engine.request import Request, RequestError
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.memory import Blocks
from shadowkv.kvcache.sequence import Sequence


@dataclass(eq=False)
class Running:
    """A request that owns a sequence, which draws by its seed from then on, whoever had it before."""

    request: Request
    sequence: Sequence

    def __post_init__(self) -> None:
        self.sequence.seed = self.request.seed


class Scheduler:
    """The waiting queue, the running set and the finished sequences.

    Args:
        cache: whose sequences are scheduled.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: prompt tokens prefilled together; a longer prompt goes alone, and so does one of more
            than a block.
    """

    def __init__(self, cache: KVCache, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.cache = cache
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Running] = []
        self.finished = FinishedSequences(cache)

    def validate(self, prompt_tokens: int, max_tokens: int) -> None:
        """Raises RequestError if a request of this size could never be admitted."""
        capacity, limit = prompt_tokens + max(1, max_tokens) - 1, self.cache.max_model_len
        if not prompt_tokens:
            raise RequestError("the prompt is empty; it needs at least one token", "prompt")
        if prompt_tokens + max_tokens > limit:
            raise RequestError(
                f"this model's maximum context length is {limit} tokens, but the prompt has {prompt_tokens} tokens and "
                f"max_tokens asks for {max_tokens} more",
                "prompt" if prompt_tokens >= limit else "max_tokens",
            )
        need = self.cache.demand(prompt_tokens, capacity)
        if not need.within(self.cache.total):
            raise RequestError(
                f"{prompt_tokens} prompt tokens and max_tokens={max_tokens} need {need} "
                f"blocks of the KV cache, which has {self.cache.total}"
            )

    def add(self, request: Request) -> None:
        """Queues a request."""
        self.waiting.append(request)

    def is_long(self, new: int) -> bool:
        """Whether so many new tokens of a prompt take more than a block: others may overtake it."""
        return new > BLOCK_TOKENS[self.cache.device.type]

    def admit(self, beside: int = 0) -> list[Running]:
        """The waiting requests to prefill together next, with their sequences.

        Args:
            beside: requests whose prefill is paused. Then long prompts are passed over, as far as there is room for
                them and the others, and the others have a block at the most.
        """
        admitted: list[Running] = []
        tokens, passed, most = 0, Blocks(), self.max_num_batched_tokens
        if beside:
            most = min(most, BLOCK_TOKENS[self.cache.device.type])
        for request in tuple(self.waiting):
            if len(self.running) + beside + len(admitted) + passed["sequences"] >= self.max_num_seqs:
                break
            length = len(request.prompt_token_ids)
            if beside and request.passed:
                passed += self.cache.demand(length, request.capacity)
                continue
            # Scores of the prompt need all of it to be computed.
            scored = request.params.prompt_logprobs is not None
            found = None if scored else self.finished.match(request.prompt_token_ids)
            new = length - (found[1] if found else 0)
            if beside and self.is_long(new):
                request.passed = True
                passed += self.cache.demand(length, request.capacity)
                continue
            if admitted and (tokens + new > most or self.is_long(new)):
                break
            sequence = self._reserve(request, found, passed, again=not beside and not admitted)
            if sequence is None:
                break
            self.waiting.remove(request)
            admitted.append(Running(request, sequence))
            tokens += new
            if self.is_long(new):
                break
        return admitted

    def finish(self, running: Running, keep: bool) -> None:
        """Ends a request; its sequence stays for a next turn if ``keep``."""
        if running in self.running:
            self.running.remove(running)
        if not keep:
            self.cache.release(running.sequence)
            return
        self.finished.keep(running.sequence, running.request.token_ids[: running.sequence.length])

    def _reserve(
        self, request: Request, found: tuple[Sequence, int] | None, left: Blocks, again: bool
    ) -> Sequence | None:
        """A sequence for a request, if there is room for it and for what is to be ``left``; where what is cached of it
        cannot be extended, one for all of its tokens, if those may be computed ``again``."""
        start, cache = len(request.prompt_token_ids), self.cache
        if found:
            sequence, common = found
            if not (cache.growth(sequence, start, request.capacity) + left).within(self._reachable(sequence)):
                return self._reserve(request, None, left, again) if again else None
            while not cache.growth(sequence, start, request.capacity).within(cache.free):
                self.finished.evict(spare=sequence)
            self.finished.take(sequence)
            cache.truncate(sequence, common)
            cache.extend(sequence, start, request.capacity)
            request.cached_tokens = common
            return sequence
        need = cache.demand(start, request.capacity)
        # Nothing is evicted for a request that would have to wait all the same.
        if not (need + left).within(self._reachable()):
            return None
        while not need.within(cache.free):
            self.finished.evict()
        return cache.allocate(start, request.capacity)

    def _reachable(self, spare: Sequence | None = None) -> Blocks:
        """What is free or would be, were all finished sequences other than ``spare`` evicted."""
        return self.cache.free + self.finished.blocks(spare)
