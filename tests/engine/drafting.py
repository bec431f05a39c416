"""Drafts that are right or wrong as a test wants them, on engines whose gates are open."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shadowkv.engine.engine import Engine
from shadowkv.engine.request import Request
from shadowkv.engine.speculation import speculation
from shadowkv.engine.speculation.gate import Gate

Drafts = Callable[[Request], Sequence[int]]
"""What a request's answer may go on with."""

SUFFIX = {"method": "suffix", "num_speculative_tokens": 6}


def draft_by(patch: pytest.MonkeyPatch, drafts: Drafts) -> None:
    """Makes engines draft what ``drafts`` returns, whatever it costs."""

    class Given:
        def __init__(self, request: Request, *others: Any) -> None:
            self._request, self.gate = request, Gate(speculation.AcceptanceRates(None, 1, 1))

        def read(self, tokens: Sequence[int]) -> None:
            pass

        def draft(self, most: int, *others: Any) -> list[int]:
            return list(drafts(self._request))[: max(most, 0)]

    patch.setattr(speculation, "_Drafts", Given)


def mostly(answers: dict[str, list[int]], right: float = 0.8) -> Drafts:
    """Drafts of the known ``answers`` by request id, each token right with this probability."""
    draw = random.Random(4)

    def drafts(request: Request) -> list[int]:
        rest = answers.get(request.request_id, [])[len(request.output_token_ids) :]
        return [token if draw.random() < right else draw.randrange(3, 256) for token in [*rest, 7, 8]]

    return drafts


def counts(engine: Engine) -> tuple[int, int]:
    """Drafted tokens that were accepted, and that were not."""
    drafting = engine.decode_steps.speculation
    assert drafting is not None
    return drafting.stats.num_accepted_tokens, drafting.stats.num_draft_tokens - drafting.stats.num_accepted_tokens
