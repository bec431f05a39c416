"""Makes requests from parameters, and refuses what could never be served."""

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
from shadowkv.prefix_cache.page_names import PageNames

WORDS_KEPT = 64
"""Lists of bad words whose token ids are kept."""


class RequestFactory:
    """Makes the requests of one engine; every method may be called from any thread.

    Args:
        vocab_size: of the model.
        stops: tokens that end an answer; those outside the vocabulary are ignored.
        scheduler: knows how much memory there is.
        origin: gives what page names of cached prompts build on, for a salt.

    Attributes:
        limits: of any request.
        stop_ids: tokens that end an answer.
        grammars: of JSON schemas and other rules.
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
        self._bad_words = lru_cache(WORDS_KEPT)(self._by_end)  # those of a body with many prompts are the same
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
        """A request for ``add``, with all work done that does not need the engine's thread; may be called on any.

        Its rules, if it has some, are compiled when it is started, unless they are by then. The rest as in ``Request``.

        Raises RequestError if it could never be served, whatever its rules.
        """
        self.limits.check(prompt_token_ids, params)
        max_tokens = self.limits.max_tokens(len(prompt_token_ids), params)
        self._scheduler.check_memory(len(prompt_token_ids), max_tokens)
        seed = params.seed
        if seed is None:  # greedy answers are repeatable by default, although the tokens they attend to are sampled too
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
        """Token ids of words, by the token before their last one."""
        found: dict[int | None, list[tuple[int, ...]]] = {}
        for spelling in self._spellings(words):
            found.setdefault(spelling[-2] if len(spelling) > 1 else None, []).append(spelling)
        return found

    def _spellings(self, words: Iterable[str]) -> Iterator[tuple[int, ...]]:
        """Token ids of each word at the beginning of a text, and after a space where that makes as many tokens and
        another first one, as in vLLM."""
        for word in words:
            forms = word.lstrip(), f" {word.lstrip()}"
            begun, after_space = (tuple(self._tokenizer.encode(form, add_special_tokens=False)) for form in forms)
            if not begun:
                raise RequestError(f"bad_words has {word!r:.100}, which is no token of this model", "bad_words")
            yield begun
            if len(after_space) == len(begun) and after_space[0] != begun[0]:
                yield after_space

    def pages(self, prompt_token_ids: list[int], cache_salt: str | None) -> list[str]:
        """Names of the pages of a prompt that can be shared."""
        return self._prompt(prompt_token_ids, cache_salt).shareable

    def _prompt(self, token_ids: list[int], salt: str | None) -> Prompt:
        return Prompt(token_ids, PageNames(self._origin(salt)).extend_to(token_ids))


def _thinking_tokens(tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Ids of the tokens around thoughts; None where the tokenizer has none."""
    begin, end = tokenizer.backend.token_to_id(BEGIN), tokenizer.backend.token_to_id(END)
    return None if begin is None or end is None else (begin, end)
