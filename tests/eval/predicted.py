"""Predictions for tests of tables and files."""

from __future__ import annotations

from shadowkv.eval.files import Prediction


def predicted(score: float, number: int = 0, policy: str = "full", task: str = "t", length: int = 1000) -> Prediction:
    """A prediction of which only what tables need is interesting."""
    kv = policy.split("@")[0]
    return Prediction(task, str(number), length, policy, kv, 1.0 if kv == "full" else 0.05, ["x"], score, 0.1)
