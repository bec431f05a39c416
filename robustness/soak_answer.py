"""The answer to one greedy request of a soak, assembled from the choices of its response."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """The answer to one greedy request."""

    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[str, float]] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, choice: dict[str, Any], skip: int = 0) -> None:
        """Adds a choice, or a part of it, without its first ``skip`` tokens."""
        part = choice.get("logprobs") or {"tokens": [], "token_logprobs": [], "top_logprobs": []}
        self.tokens += part["tokens"][skip:]
        self.logprobs += part["token_logprobs"][skip:]
        self.top += part["top_logprobs"][skip:]
        self.finish_reason = choice["finish_reason"] or self.finish_reason

    @classmethod
    def of_chat(cls, choice: dict[str, Any]) -> Answer:
        """The answer in a chat completion's choice."""
        steps = choice["logprobs"]["content"]
        top = [{other["token"]: other["logprob"] for other in step["top_logprobs"]} for step in steps]
        return cls([step["token"] for step in steps], [step["logprob"] for step in steps], top, choice["finish_reason"])


def compare(expected: Answer, answer: Answer, tolerance: float) -> tuple[str, float]:
    """Whether an answer is the "same" as expected, one of two "near-ties", or "wrong"; and by how much
    log-probabilities differ before the first different token.

    Equal ones are within ``tolerance``; where two tokens were that close, rounding may have chosen the other one.
    """
    difference, verdict = 0.0, "same" if len(answer.tokens) == len(expected.tokens) else "wrong"
    for token, other, top, one, two in zip(
        answer.tokens, expected.tokens, expected.top, answer.logprobs, expected.logprobs, strict=False
    ):
        if token != other:
            # Both may be off by the tolerance, so tokens that swap places may be twice that apart.
            close = two - top.get(token, float("-inf")) < 2 * tolerance
            verdict = "near-ties" if close else "wrong"
            break
        difference = max(difference, abs(one - two))
    return "wrong" if difference > tolerance else verdict, difference
