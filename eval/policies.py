"""The policies of an evaluation: presets x budgets, each under the label that files and tables give it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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


def local_policies(presets: Sequence[str], budgets: Sequence[float | int], shape: ModelShape) -> list[Policy]:
    """Every preset under every budget (without any, under its own default), once; full attention has none.

    Raises ValueError for what cannot be.
    """
    policies: dict[str, Policy] = {}
    for kv in presets:
        selects = preset(kv).index != "none"
        for budget in budgets if selects and budgets else (None,):
            label = kv if budget is None else f"{kv}@{budget}"
            policies[label] = Policy(label, kv, preset(kv, budget=budget).resolve(shape))
    return list(policies.values())


def served_policy(name: str) -> Policy:
    """The policy of a server, whatever it is, under the user's name for it."""
    return Policy(name, name, None)
