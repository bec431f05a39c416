"""Position of a request in the grammar that its answer must follow: tokens that may not come next are masked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    import xgrammar


class Constraint:
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
