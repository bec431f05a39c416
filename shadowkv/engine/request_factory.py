"""Makes requests from parameters, and refuses what could never be served."""

from __future__ import annotations

import random
from collections.abc import Iterable

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.request import Request, RequestError
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.engine.scheduling.scheduler import Scheduler
from shadowkv.engine.startup.prefix_cache import Origin
from shadowkv.engine.structured.grammar import GrammarCompiler
from shadowkv.models.tokenization.tokenizer import Tokenizer
from shadowkv.ops.sample_tokens.weights import COLDEST
from shadowkv.prefix_cache.device.matches import Prompt
from shadowkv.prefix_cache.page_names import PageNames


class RequestFactory:
    """Makes the requests of one engine; every method may be called from any thread.

    Args:
        vocab_size: of the model.
        stops: tokens that end an answer; those outside the vocabulary are ignored.
        scheduler: decides what is too long.
        origin: gives what page names of cached prompts build on, for a salt.
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
        self._config, self._vocab_size, self._scheduler, self._origin = config, vocab_size, scheduler, origin
        self._stop_ids = frozenset(token for token in stops if token < vocab_size)
        self._grammars = GrammarCompiler(tokenizer, vocab_size, self._stop_ids)

    def max_tokens(self, prompt_tokens: int, params: SamplingParams) -> int:
        """Tokens a request may generate: what it asks for, or the default as far as the context has room."""
        if params.max_tokens is not None:
            return params.max_tokens
        return max(1, min(self._config.default_max_tokens, self._scheduler.cache.max_model_len - prompt_tokens))

    def compile_grammar(self, schema: str, one_line: bool = False) -> None:
        """Prepares a JSON schema for fast use, on any thread; raises RequestError if nothing can satisfy it."""
        self._grammars.compile(schema, one_line)

    def validate(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raises RequestError for a request that could never be served, whatever its JSON schema."""
        vocab = self._vocab_size
        named = {"prompt": prompt_token_ids, "logit_bias": params.logit_bias, "stop_token_ids": params.stop_token_ids}
        for name, ids in named.items():
            for token in (min(ids, default=0), max(ids, default=0)):
                if not 0 <= token < vocab:
                    raise RequestError(f"token id {token} is not in this model's vocabulary of {vocab}", name)
        if params.json_schema is not None and (params.min_tokens or params.ignore_eos):
            raise RequestError(
                "a JSON schema says where the output ends: no min_tokens or ignore_eos with it", "response_format"
            )
        self._scheduler.validate(len(prompt_token_ids), self.max_tokens(len(prompt_token_ids), params))

    def request(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> Request:
        """A request for ``add``, with all work done that does not need the engine's thread; may be called on any.

        Raises RequestError if it could never be served.
        """
        self.validate(prompt_token_ids, params)
        seed = params.seed
        if seed is None:  # greedy answers are repeatable by default, although the tokens they attend to are sampled too
            seed = random.getrandbits(64) if params.temperature > COLDEST else 0
        max_tokens = self.max_tokens(len(prompt_token_ids), params)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._stop_ids)
        constraint = None
        if params.json_schema is not None:
            constraint = self._grammars.constraint(params.json_schema, params.json_one_line)
        prompt_token_ids, prompt = list(prompt_token_ids), None
        if self._config.enable_prefix_caching and params.cache_prompt:
            prompt = Prompt(prompt_token_ids, PageNames(self._origin(params.cache_salt)).extend_to(prompt_token_ids))
        return Request(request_id, prompt_token_ids, params, max_tokens, seed, stop_ids, constraint, prompt)
