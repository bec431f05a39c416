"""Makes ``Request`` objects from prompts and sampling parameters, and refuses requests that can never be served."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from functools import lru_cache

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.execution.thinking_budget import BEGIN, END, ThinkingBudget
from shadowkv.engine.request import Request, RequestError, RequestLimits
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.engine.scheduling.repetition import Repetition
from shadowkv.engine.scheduling.scheduler import Scheduler
from shadowkv.engine.startup.prefix_cache import Origin
from shadowkv.engine.structured.grammar import Grammars
from shadowkv.models.tokenization.tokenizer import Tokenizer
from shadowkv.ops.sample_tokens.weights import COLDEST
from shadowkv.prefix_cache.matches import Prompt
from shadowkv.prefix_cache.page_hashes import PageHashes

WORDS_KEPT = 64
"""Number of lists of bad words whose token ids are cached."""


class RequestFactory:
    """Makes the requests of one engine. Any thread can call every method.

    Args:
        vocab_size: number of token ids of the model.
        stops: tokens that end an answer. Tokens outside the vocabulary are ignored.
        scheduler: checks that the memory is large enough.
        origin: maps a cache salt to the first link of the chain of page hashes.

    Attributes:
        limits: limits on the parameters of requests.
        stop_ids: tokens that end an answer.
        grammars: compiles JSON schemas and grammars.
    """

    def __init__(
        self,
        config: EngineConfig,
        vocab_size: int,
        tokenizer: Tokenizer,
        stops: Iterable[int],
        scheduler: Scheduler,
        origin: Origin,
    ) -> None:
        self._config, self._scheduler, self._origin = config, scheduler, origin
        self._random = random.Random(config.seed)
        self._tokenizer = tokenizer
        self._bad_words = lru_cache(WORDS_KEPT)(self._by_end)  # all prompts of an HTTP request have the same bad words
        self.limits = RequestLimits(
            vocab_size,
            scheduler.cache.max_model_len,
            config.default_max_tokens,
            config.max_logprobs,
            _thinking_tokens(tokenizer),
        )
        self.stop_ids = frozenset(token for token in stops if token < vocab_size)
        self.grammars = Grammars(tokenizer, vocab_size, self.stop_ids)

    def request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tenant: str = "",
        priority: int = 0,
    ) -> Request:
        """Makes a request for ``Engine.add``. Any thread can call it.

        Arguments are as in ``Request``. If the request has a grammar that is not compiled yet, the grammar is compiled
        when the request starts. Raises RequestError if the request can never be served, except because of its grammar,
        which is not checked here.
        """
        self.limits.check(prompt_token_ids, params)
        max_tokens = self.limits.max_tokens(len(prompt_token_ids), params)
        self._scheduler.check_memory(len(prompt_token_ids), max_tokens)
        seed = params.seed
        if seed is None:  # attention can sample tokens too; with seed 0, greedy answers are repeatable
            seed = self._random.getrandbits(64) if params.temperature > COLDEST else 0
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.stop_ids)
        constraint = None
        if params.rules is not None:
            constraint = self.grammars.constraint(params.rules, params.one_line, tenant)
        prompt_token_ids, prompt = list(prompt_token_ids), None
        if self._config.enable_prefix_caching and params.cache_prompt:
            prompt = self._prompt(prompt_token_ids, params.cache_salt)
        thoughts = None
        if params.thinking_token_budget is not None and self.limits.thinking_tokens is not None and constraint is None:
            thoughts = ThinkingBudget(self.limits.thinking_tokens, params.thinking_token_budget, prompt_token_ids)
        detection = params.repetition_detection
        repetition = Repetition(detection) if detection is not None and detection.max_pattern_size else None
        bad_words = self._bad_words(params.bad_words)
        return Request(
            request_id,
            prompt_token_ids,
            params,
            max_tokens,
            seed,
            stop_ids,
            constraint,
            prompt,
            tenant,
            priority,
            bad_words,
            thoughts,
            repetition,
        )

    def _by_end(self, words: tuple[str, ...]) -> dict[int | None, list[tuple[int, ...]]]:
        """Returns words as token ids. A word's key is its second-last token, or None if the word has only one token."""
        found: dict[int | None, list[tuple[int, ...]]] = {}
        for spelling in self._spellings(words):
            found.setdefault(spelling[-2] if len(spelling) > 1 else None, []).append(spelling)
        return found

    def _spellings(self, words: Iterable[str]) -> Iterator[tuple[int, ...]]:
        """Yields the token ids that each word has at the start of a text. As in vLLM, it also yields the ids that the
        word has after a space, if their number is equal and the first id differs."""
        for word in words:
            forms = word.lstrip(), f" {word.lstrip()}"
            begun, after_space = (tuple(self._tokenizer.encode(form, add_special_tokens=False)) for form in forms)
            if not begun:
                raise RequestError(f"bad_words has {word!r:.100}, which has no tokens in this model", "bad_words")
            yield begun
            if len(after_space) == len(begun) and after_space[0] != begun[0]:
                yield after_space

    def pages(self, prompt_token_ids: list[int], cache_salt: str | None) -> list[str]:
        """Returns the hashes of a prompt's shareable pages."""
        return self._prompt(prompt_token_ids, cache_salt).shareable

    def _prompt(self, token_ids: list[int], salt: str | None) -> Prompt:
        return Prompt(token_ids, PageHashes(self._origin(salt)).extend_to(token_ids))


def _thinking_tokens(tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Ids of the tokens that begin and end thoughts; None if the tokenizer has none."""
    begin, end = tokenizer.backend.token_to_id(BEGIN), tokenizer.backend.token_to_id(END)
    return None if begin is None or end is None else (begin, end)
