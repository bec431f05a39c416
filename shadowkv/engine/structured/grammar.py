"""Output that follows a JSON schema or other rules: tokens that would violate them are masked (XGrammar,
arXiv:2411.15100)."""

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
from shadowkv.engine.structured.json_schema import Effort, check_schema, name_and_param
from shadowkv.engine.structured.vocabulary import Vocabulary
from shadowkv.models.tokenization.tokenizer import Tokenizer
from shadowkv.prefix_cache.protocol import settle


class Grammars:
    """The grammars of one engine's requests; may be used from any thread, and never makes one wait.

    Attributes:
        pool: the processes that compile and match them.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: frozenset[int]) -> None:
        self.pool = GrammarPool(partial(Vocabulary.of, tokenizer, vocab_size, stop_ids))
        self._numbers = count()

    def compile(
        self, rules: str, one_line: bool = False, effort: Effort | None = None, tenant: str = ""
    ) -> Future[None]:
        """Has the grammar of a JSON schema (as JSON text), or of other rules (``grammar_text``), compiled.

        Args:
            one_line: as in ``SamplingParams.json_one_line``.
            effort: that of ``check_schema``, where that has been called; it takes a while for long schemas.
            tenant: whose turn it takes.

        The future raises RequestError where xgrammar is not installed or cannot follow the rules, or nothing can
        satisfy them; SchemaTimeout where that takes too much.
        """
        try:
            if find_spec("xgrammar") is None:
                raise RequestError(
                    "JSON output needs xgrammar, which the server lacks: there, pip install xgrammar",
                    name_and_param(rules)[1],
                )
            return self.pool.compile(Grammar(rules, one_line), effort or check_schema(rules).effort, tenant)
        except RequestError as error:
            settle(refused := Future[None](), error)
            return refused

    def constraint(self, rules: str, one_line: bool = False, tenant: str = "") -> GrammarConstraint:
        """An answer that will follow rules that have been compiled."""
        return GrammarConstraint(self.pool, next(self._numbers), Grammar(rules, one_line), tenant)


class GrammarConstraint:
    """One answer's place in its grammar, as the engine's thread sees it (``Constraint``) and the pool's (``Answer``).

    What may come next is found in the grammar's process, while the engine goes on.

    Attributes:
        failure: why it cannot go on; None if it can.
    """

    def __init__(self, pool: GrammarPool, number: int, grammar: Grammar, tenant: str) -> None:
        self._pool, self._number, self.grammar, self.tenant = pool, number, grammar, tenant
        self._mask, self._ready = b"", threading.Event()
        self.failure: RequestError | None = None

    @property
    def effort(self) -> Effort:
        """What compiling its grammar may take, should that be gone by now."""
        return check_schema(self.grammar.rules).effort

    def start(self) -> None:
        """Has what may come first found, while the engine goes on."""
        self._pool.open(self._number, self)

    def is_ready(self, seconds: float | None = 0.0) -> bool:
        """Whether it is known what may come next, or that the answer cannot go on; waits for that so long."""
        return self._ready.wait(seconds)

    def mask(self, logits: Tensor) -> None:
        """Sets the logits [V] of tokens that may not come next to -inf, in place, if it is ready and has not failed."""
        if self.failure is not None:
            return
        allowed = np.unpackbits(np.frombuffer(self._mask, np.uint8), count=len(logits), bitorder="little")
        logits.masked_fill_(torch.from_numpy(allowed == 0).to(logits.device), float("-inf"))

    def accept(self, token: int) -> bool:
        """Takes the chosen token and has found what may follow; False if it may not come next."""
        if not self._mask[token // 8] >> token % 8 & 1:
            return False
        self._ready.clear()
        if self.failure is not None:  # since it has been looked at
            self._ready.set()
        self._pool.accept(self._number, self, token)
        return True

    def close(self) -> None:
        """Says that the answer has ended."""
        self._pool.end(self._number, self)

    def may_continue(self, mask: bytes) -> None:
        """Takes a bit for each token, 1 where it may come next."""
        self._mask = mask
        self._ready.set()

    def fail(self, error: RequestError) -> None:
        """Ends it."""
        self.failure = error
        self._ready.set()
