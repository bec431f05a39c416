"""Drafts that are right or wrong as a test wants them, on engines whose gates are open; what requests are answered."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from test_engine import assert_empty, prompt, tokens

from shadowkv import SamplingParams
from shadowkv.engine.engine import Engine
from shadowkv.engine.outputs import TokenOutput
from shadowkv.engine.request import Request
from shadowkv.engine.sampling_params import RepetitionDetectionParams
from shadowkv.engine.speculation import speculation
from shadowkv.engine.speculation.gate import Gate

Drafts = Callable[[Request], Sequence[int]]
"""What a request's answer may go on with."""

SUFFIX = {"method": "suffix", "num_speculative_tokens": 6}

PLAIN = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
SEEDED = replace(PLAIN, temperature=1.0, seed=7)
KINDS = [
    PLAIN,
    replace(SEEDED, stop_token_ids=tuple(range(3, 6))),
    replace(PLAIN, max_tokens=1),
    replace(PLAIN, max_tokens=2, ignore_eos=False),
    replace(PLAIN, repetition_penalty=1.3),
    replace(SEEDED, presence_penalty=1.5, frequency_penalty=0.5),
    replace(SEEDED, logprobs=2, max_tokens=40),
    replace(SEEDED, temperature=0.8, min_tokens=60, stop_token_ids=tuple(range(3, 40)), top_k=20),
    replace(SEEDED, logit_bias={9: 4.0, 11: 3.0}, min_p=0.05),
    replace(PLAIN, allowed_token_ids=(4, 5, 6, 7), repetition_detection=RepetitionDetectionParams(4, 1, 5)),
]
"""All that can change which token comes next, or where an answer ends."""


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


def clock_of_steps(patch: pytest.MonkeyPatch) -> Any:
    """Gives steps and draft steps a clock of their own: its ``now`` is what their marks measure."""

    class Mark:
        now = 0.0

        def __init__(self, device: Any) -> None:
            self.at = Mark.now

        def wait(self) -> None:
            pass

        def since(self, other: Any) -> float:
            return float(self.at - other.at)

    for module in ("model_drafts", "decode_steps"):
        patch.setattr(f"shadowkv.engine.scheduling.{module}.Mark", Mark)
    return Mark


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


def said(engine: Engine) -> tuple[dict[str, tuple[list[int], str | None]], list[float]]:
    """What all kinds of requests are answered, beside others that are aborted, and log-probabilities."""
    for number, params in enumerate(KINDS * 2):
        engine.add_request(str(number), prompt(number, (450, 70)[number % 2]), params)
        engine.add_request(f"aborted {number}", prompt(number, 300), PLAIN)
    outputs: dict[str, list[TokenOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
            if output.request_id.startswith("aborted") and output.completion_tokens > 9:
                engine.abort(output.request_id)
    assert_empty(engine)
    whole = {name: (tokens(of_it), of_it[-1].finish_reason) for name, of_it in outputs.items() if name.isdecimal()}
    steps = (step for name in sorted(whole) for output in outputs[name] for step in output.logprobs or ())
    return whole, [step.logprob for step in steps]
