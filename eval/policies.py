"""The policies of an evaluation: presets x budgets, each under the label that files and tables give it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shadowkv.engine.config import parse_budget
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.shape import ModelShape
from shadowkv.kvcache.spec import KVSpec


@dataclass(frozen=True)
class Policy:
    """What answers a sample.

    Attributes:
        label: the preset, and after an ``@`` the budget that was asked for.
        kv: the preset.
        spec: resolved for the model; None where a server has the cache.
    """

    label: str
    kv: str
    spec: KVSpec | None

    def budget(self, length: int) -> float | None:
        """Share of a context of ``length`` tokens that a step may select."""
        if self.spec is None:
            return None
        return round(float(self.spec.budget_tokens(np.asarray(length))) / length, 6)


def local_policies(names: Sequence[str], budgets: Sequence[float | int], shape: ModelShape) -> list[Policy]:
    """Presets, once each: under the budget that follows an ``@``, else under every one of ``budgets``, else their own.

    Full attention has no budget. Raises ValueError for what cannot be.
    """
    policies: dict[str, Policy] = {}
    for name in names:
        kv, _, own = name.partition("@")
        selects = preset(kv).index != "none"
        for budget in [checked_budget(own)] if own else (budgets if selects and budgets else (None,)):
            label = kv if budget is None else f"{kv}@{budget}"
            policies[label] = Policy(label, kv, preset(kv, budget=budget).resolve(shape))
    return list(policies.values())


def checked_budget(text: str) -> float | int:
    """A share of the context or a number of tokens; raises ValueError where it is neither."""
    try:
        budget = parse_budget(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is neither a fraction nor a number of tokens") from error
    if not 0 < budget < math.inf or (isinstance(budget, float) and budget > 1):
        raise ValueError(f"{text!r} must be a fraction in (0, 1] or at least 1 token")
    return budget


def served_policy(name: str) -> Policy:
    """The policy of a server, whatever it is, under the user's name for it."""
    return Policy(name, name, None)
