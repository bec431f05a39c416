"""Predictions for tests of tables and files."""

from __future__ import annotations

from shadowkv.eval.records.predictions import Prediction


def predicted(
    score: float,
    number: int = 0,
    policy: str = "full",
    task: str = "t",
    length: int = 1000,
    output_tokens: int | None = None,
) -> Prediction:
    """A prediction of which only what tables need is interesting."""
    kv = policy.split("@")[0]
    budget = 1.0 if kv == "full" else 0.05
    return Prediction(task, str(number), length, policy, kv, budget, ["x"], score, 0.1, output_tokens=output_tokens)
