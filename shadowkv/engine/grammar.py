"""Output that follows a JSON schema: tokens that would break it are masked (XGrammar, arXiv:2411.15100)."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shadowkv.engine.request import RequestError

if TYPE_CHECKING:
    import xgrammar

    from shadowkv.models.tokenizer import Tokenizer

ANY_JSON = "{}"
"""The schema that any JSON object or value satisfies."""


class Constraint:
    """Where one request stands in its grammar."""

    def __init__(self, grammar: xgrammar.CompiledGrammar, vocab_size: int) -> None:
        import xgrammar

        self._apply = xgrammar.apply_token_bitmask_inplace
        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._mask = xgrammar.allocate_token_bitmask(1, vocab_size)

    def mask(self, logits: Tensor) -> None:
        """Sets the logits [V] of tokens that may not come next to -inf, in place."""
        self._matcher.fill_next_token_bitmask(self._mask, 0)
        self._apply(logits.unsqueeze(0), self._mask.to(logits.device))

    def accept(self, token: int) -> bool:
        """Takes the chosen token; True once nothing may follow."""
        self._matcher.accept_token(token)
        return bool(self._matcher.is_terminated())


class GrammarCompiler:
    """Compiles schemas for one model's vocabulary; the same schema is compiled once. May be used from any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, sorted(stop_ids)
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._compiled: dict[str, xgrammar.CompiledGrammar] = {}
        self._lock = threading.Lock()

    def compile(self, schema: str) -> xgrammar.CompiledGrammar:
        """The grammar of a JSON schema (as JSON text).

        Raises RequestError where xgrammar is not installed or cannot follow the schema.
        """
        found = self._compiled.get(schema)
        if found is None:
            with self._lock:
                found = self._compiled[schema] = self._compile(schema)
        return found

    def _compile(self, schema: str) -> xgrammar.CompiledGrammar:
        try:
            if self._compiler is None:
                self._compiler = self._build()
            if json.loads(schema) == json.loads(ANY_JSON):
                return self._compiler.compile_builtin_json_grammar()
            return self._compiler.compile_json_schema(schema)
        except ImportError as error:
            message = "JSON output needs xgrammar: install shadowkv[json] on the server"
            raise RequestError(message, "response_format") from error
        except (RuntimeError, ValueError) as error:
            reason = str(error).rsplit("Check failed: ")[-1].strip()
            raise RequestError(f"the JSON schema cannot be followed: {reason}", "response_format") from error

    def constraint(self, schema: str) -> Constraint:
        """A fresh start in the grammar of ``schema``."""
        return Constraint(self.compile(schema), self._vocab_size)

    def _build(self) -> xgrammar.GrammarCompiler:
        import xgrammar

        vocabulary = [""] * self._vocab_size
        for text, token in self._tokenizer.vocabulary().items():
            if token < self._vocab_size:
                vocabulary[token] = text
        kind = xgrammar.VocabType.BYTE_LEVEL if self._tokenizer.is_byte_level else xgrammar.VocabType.BYTE_FALLBACK
        info = xgrammar.TokenizerInfo(
            vocabulary, vocab_type=kind, vocab_size=self._vocab_size, stop_token_ids=self._stop_ids
        )
        return xgrammar.GrammarCompiler(info, max_threads=max(1, torch.get_num_threads()))
