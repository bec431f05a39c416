"""Constrained decoding: tokens that violate a JSON schema or grammar are masked (XGrammar, arXiv:2411.15100).

``RequestFactory`` makes a ``GrammarConstraint`` for each answer; the sampler applies its masks.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec
from itertools import count

import numpy as np
import torch
from torch import Tensor

from shadowkv.engine.request import RequestError
from shadowkv.engine.structured.grammar_pool import Grammar, GrammarPool
from shadowkv.engine.structured.json_schema import MAX_GRAMMAR_CHARS, name_and_param, refusal
from shadowkv.engine.structured.vocabulary import Vocabulary
from shadowkv.models.tokenization.tokenizer import Tokenizer
from shadowkv.prefix_cache.protocol import settle


class Grammars:
    """The grammars of one engine's requests. Any thread can use it; no method waits.

    Attributes:
        pool: the processes that compile and match grammars.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: frozenset[int]) -> None:
        self.pool = GrammarPool(partial(Vocabulary.of, tokenizer, vocab_size, stop_ids))
        self._numbers = count()

    def compile(self, rules: str, one_line: bool = False, tenant: str = "") -> Future[None]:
        """Starts to compile a JSON schema (as JSON text) or another grammar (``grammar_text``).

        Args:
            one_line: as in ``SamplingParams.json_one_line``.
            tenant: the tenant whose turn the compilation takes.

        The future raises RequestError if xgrammar is not installed or refuses the grammar, or if no output can satisfy
        the grammar. It raises SchemaTimeout if compiling takes too much time or memory.
        """
        try:
            if find_spec("xgrammar") is None:
                raise RequestError(
                    "JSON output needs xgrammar, which is not installed on the server: pip install xgrammar",
                    name_and_param(rules)[1],
                )
            if len(rules) > MAX_GRAMMAR_CHARS:
                raise refusal(f"it has {len(rules)} characters; at most {MAX_GRAMMAR_CHARS} are supported", rules)
            return self.pool.compile(Grammar(rules, one_line), tenant)
        except RequestError as error:
            settle(refused := Future[None](), error)
            return refused

    def constraint(self, rules: str, one_line: bool = False, tenant: str = "") -> GrammarConstraint:
        """Makes the grammar state of a new answer."""
        return GrammarConstraint(self.pool, next(self._numbers), Grammar(rules, one_line), tenant)


class GrammarConstraint:
    """The grammar state of one answer. The engine thread uses it as a ``Constraint``, and the pool's thread as an
    ``Answer``. The grammar's process computes the masks while the engine goes on.

    Attributes:
        failure: why the answer cannot go on; None if it can.
    """

    def __init__(self, pool: GrammarPool, number: int, grammar: Grammar, tenant: str) -> None:
        self._pool, self._number, self.grammar, self.tenant = pool, number, grammar, tenant
        self._mask, self._ready = b"", threading.Event()
        self.failure: RequestError | None = None

    def start(self) -> None:
        """Starts to compute the mask of the first token, in another process."""
        self._pool.open(self._number, self)

    def is_ready(self, seconds: float | None = 0.0) -> bool:
        """Whether the next mask is ready or the constraint has failed. Waits up to ``seconds`` for it; None waits
        without a limit."""
        return self._ready.wait(seconds)

    def mask(self, logits: Tensor) -> None:
        """Sets the logits [V] of forbidden next tokens to -inf, in place. Call it only when the mask is ready. Does
        nothing if the constraint has failed."""
        if self.failure is not None:
            return
        allowed = np.unpackbits(np.frombuffer(self._mask, np.uint8), count=len(logits), bitorder="little")
        logits.masked_fill_(torch.from_numpy(allowed == 0).to(logits.device), float("-inf"))

    def accept(self, token: int) -> bool:
        """Adds the chosen token and starts to compute the next mask. False if the grammar forbids the token."""
        if not self._mask[token // 8] >> token % 8 & 1:
            return False
        self._ready.clear()
        if self.failure is not None:  # the pool's thread has set it in the meantime
            self._ready.set()
        self._pool.accept(self._number, self, token)
        return True

    def close(self) -> None:
        """Ends the constraint, because the answer has ended."""
        self._pool.end(self._number, self)

    def may_continue(self, mask: bytes) -> None:
        """Sets the next mask: a bit for each token, 1 if it is allowed."""
        self._mask = mask
        self._ready.set()

    def fail(self, error: RequestError) -> None:
        """Ends the answer with an error."""
        self.failure = error
        self._ready.set()
