"""Output that follows a JSON schema: tokens that would violate it are masked (XGrammar, arXiv:2411.15100)."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from shadowkv.engine.request import RequestError
from shadowkv.engine.structured.json_schema import check_schema, refusal

if TYPE_CHECKING:
    import xgrammar

    from shadowkv.models.tokenization.tokenizer import Tokenizer

CACHE_BYTES = 2**29
"""Size of the compiled grammars that are kept."""

LOG_PREFIX = re.compile(r"^.*(Check failed: (\(.*?\) is false: )?|\.(cc|h):\d+: )", re.DOTALL)
"""Time, source file and condition before the compiler's message."""


CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")


class GrammarCompiler:
    """Compiles schemas for one model's vocabulary. May be used from any thread; compiling does not block the others."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, sorted(stop_ids)
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._allowed = torch.empty(0)
        self._lock = threading.Lock()

    def compile(self, schema: str, one_line: bool = False) -> xgrammar.CompiledGrammar:
        """The grammar of a JSON schema (as JSON text); the compiler keeps it, so that the next time is fast.

        ``one_line`` is as in ``SamplingParams.json_one_line``.

        Raises RequestError where xgrammar is not installed or cannot follow the schema, or nothing can satisfy it.
        """
        anything = check_schema(schema).anything
        try:
            with self._lock:
                compiler = self._compiler = self._compiler or self._build()
            if anything:
                return compiler.compile_builtin_json_grammar()
            return compiler.compile_json_schema(schema, any_whitespace=not one_line)
        except ImportError as error:
            message = "JSON output needs xgrammar, which the server lacks: there, pip install xgrammar"
            raise RequestError(message, "response_format") from error
        except (RuntimeError, ValueError) as error:  # includes RecursionError
            reason = LOG_PREFIX.sub("", str(error)).strip()
            raise refusal(reason or "xgrammar gives no reason; simpler patterns may do") from error

    def constraint(self, schema: str, one_line: bool = False) -> GrammarConstraint:
        """A new position at the start of ``schema``'s grammar; raises RequestError as ``compile`` does."""
        return GrammarConstraint(self.compile(schema, one_line), self._vocab_size, self._allowed)

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
        self._allowed = _without_control_characters(info.decoded_vocab, self._vocab_size)
        threads = max(1, torch.get_num_threads() // 2)  # the other threads are for requests being served
        return xgrammar.GrammarCompiler(info, max_threads=threads, cache_limit_bytes=CACHE_BYTES)


class GrammarConstraint:
    """Position of one request in its grammar."""

    def __init__(self, grammar: xgrammar.CompiledGrammar, vocab_size: int, allowed: Tensor) -> None:
        import xgrammar

        self._allowed = allowed
        self._apply = xgrammar.apply_token_bitmask_inplace
        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._mask = xgrammar.allocate_token_bitmask(1, vocab_size)

    def mask(self, logits: Tensor) -> None:
        """Sets the logits [V] of tokens that may not come next to -inf, in place."""
        self._matcher.fill_next_token_bitmask(self._mask, 0)
        self._mask &= self._allowed
        self._apply(logits.unsqueeze(0), self._mask.to(logits.device))

    def accept(self, token: int) -> bool:
        """Accepts the chosen token; False if it may not come next, as for any token where the grammar is stuck."""
        return bool(self._matcher.accept_token(token))

    @property
    def complete(self) -> bool:
        """Whether nothing more may follow."""
        return bool(self._matcher.is_terminated())


def _without_control_characters(vocabulary: list[bytes], vocab_size: int) -> Tensor:
    """A mask of the tokens without control characters except line ends, which are white space in JSON; int32 [1, n].

    XGrammar accepts them in strings of limited length, in which JSON does not allow them unescaped.
    """
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    bits[:vocab_size] = [CONTROL.search(token) is None for token in vocabulary]
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))[None]
