"""Output that follows a JSON schema: tokens that would violate it are masked (XGrammar, arXiv:2411.15100)."""

from __future__ import annotations

import re
import threading
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from shadowkv.engine.request import RequestError
from shadowkv.engine.structured.grammar_text import grammar_kind
from shadowkv.engine.structured.json_schema import check_schema, refusal
from shadowkv.engine.structured.trials import SECONDS, SchemaTrials
from shadowkv.engine.structured.vocabulary import Vocabulary, compile_schema, new_compiler

if TYPE_CHECKING:
    import xgrammar

    from shadowkv.models.tokenization.tokenizer import Tokenizer

KEPT_BYTES = 2**28
"""Size of the compiled grammars that are kept."""

CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")


class GrammarCompiler:
    """Compiles schemas for one model's vocabulary. May be used from any thread; compiling does not block the others.

    Attributes:
        trials: of schemas whose compilation may never end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: frozenset[int]) -> None:
        self._vocabulary = partial(Vocabulary.of, tokenizer, vocab_size, stop_ids)
        self._vocab_size, self._compiler = vocab_size, cast("xgrammar.GrammarCompiler | None", None)
        self.trials = SchemaTrials(self._vocabulary)
        self._allowed = torch.empty(0)
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, bool], xgrammar.CompiledGrammar] = {}
        self._kept_bytes, self._keeping = 0, threading.Lock()

    def compile(self, schema: str, one_line: bool = False) -> xgrammar.CompiledGrammar:
        """The grammar of a JSON schema (as JSON text), which is kept, so that the next time is fast.

        ``one_line`` is as in ``SamplingParams.json_one_line``.

        Raises RequestError where xgrammar is not installed or cannot follow the schema, or nothing can satisfy it;
        SchemaTimeout where compiling it would take too long.
        """
        if (grammar := self._look_up(schema, one_line)) is not None:
            return grammar
        cost = check_schema(schema)
        try:
            with self._lock:
                compiler = self._compiler = self._compiler or self._build()
            if cost.effort != "small":
                self.trials.run(schema, one_line, SECONDS[cost.effort])
            grammar = compile_schema(compiler, schema, one_line)
        except ImportError as error:
            message = "JSON output needs xgrammar, which the server lacks: there, pip install xgrammar"
            raise RequestError(message, "response_format") from error
        except RequestError:
            raise
        except ValueError as error:
            raise refusal(str(error), schema) from error
        self._keep(schema, one_line, grammar)
        return grammar

    def has(self, schema: str, one_line: bool) -> bool:
        """Whether the grammar of a schema is kept."""
        return self._look_up(schema, one_line) is not None

    def constraint(self, schema: str, one_line: bool = False) -> GrammarConstraint:
        """A new position at the start of the grammar of a schema, or of other rules (``grammar_text``); raises
        RequestError as ``compile`` does."""
        grammar = self.compile(schema, one_line)
        return GrammarConstraint(grammar, self._vocab_size, self._allowed if grammar_kind(schema) is None else None)

    def _build(self) -> xgrammar.GrammarCompiler:
        info = self._vocabulary().info()
        self._allowed = _without_control_characters(info.decoded_vocab, self._vocab_size)
        # The other threads are for requests being served.
        return new_compiler(info, max(1, torch.get_num_threads() // 2))

    def _look_up(self, schema: str, one_line: bool) -> xgrammar.CompiledGrammar | None:
        with self._keeping:
            grammar = self._kept.pop((schema, one_line), None)
            if grammar is not None:
                self._kept[schema, one_line] = grammar  # the last one to go
            return grammar

    def _keep(self, schema: str, one_line: bool, grammar: xgrammar.CompiledGrammar) -> None:
        with self._keeping:
            if (schema, one_line) in self._kept:  # another thread was faster
                return
            self._kept[schema, one_line] = grammar
            self._kept_bytes += grammar.memory_size_bytes
            while self._kept_bytes > KEPT_BYTES:
                self._kept_bytes -= self._kept.pop(next(iter(self._kept))).memory_size_bytes


class GrammarConstraint:
    """Position of one request in its grammar."""

    def __init__(self, grammar: xgrammar.CompiledGrammar, vocab_size: int, allowed: Tensor | None) -> None:
        import xgrammar

        self._allowed = allowed
        self._apply = xgrammar.apply_token_bitmask_inplace
        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._mask = xgrammar.allocate_token_bitmask(1, vocab_size)

    def mask(self, logits: Tensor) -> None:
        """Sets the logits [V] of tokens that may not come next to -inf, in place."""
        self._matcher.fill_next_token_bitmask(self._mask, 0)
        if self._allowed is not None:
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
