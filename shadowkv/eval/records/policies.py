"""The policies of an evaluation: presets x budgets, each under its label in files and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shadowkv.engine.config import refused_policy
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.shape import ModelShape
from shadowkv.kvcache.spec import KVSpec


@dataclass(frozen=True)
class Policy:
    """What answers a sample.

    Attributes:
        label: ``kv``, and after an ``@`` the requested budget.
        kv: the preset, and after a colon its changed fields, except the budget.
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
    """Policies as ``preset`` reads them, once each: with their own budget, or else with each of ``budgets``.

    Full attention has no budget. Raises SettingsError for invalid ones.
    """
    from shadowkv.kvcache.parts import resolve  # which imports PyTorch: --help works without

    policies: dict[str, Policy] = {}
    for name in names:
        spec, kv = preset(name), without_field(name, "budget")[0]
        own = spec.budget is not None or not spec.selects or not budgets
        for budget in (spec.budget,) if own else budgets:
            label = kv if budget is None else f"{kv}@{budget}"
            try:
                resolved = resolve(preset(spec, budget=budget), shape)
            except ValueError as error:
                raise refused_policy(error, name, budget=None if own else budget) from error
            policies[label] = Policy(label, kv, resolved)
    return list(policies.values())


def without_field(name: str, field: str) -> tuple[str, str | None]:
    """A policy's name or label without one of its fields, and the value that it had there."""
    kv, at, budget = name.partition("@")
    preset_name, _, changes = kv.partition(":")
    fields = dict(change.split("=", 1) for change in changes.split(",") if change)
    value = budget if at and field == "budget" else fields.get(field)
    others = [f"{name}={text}" for name, text in fields.items() if name != field]
    kv = f"{preset_name}:{','.join(others)}" if others else preset_name
    return kv if field == "budget" else kv + at + budget, value


def served_policy(name: str) -> Policy:
    """A server's policy, whatever it is, under the user's name for it."""
    return Policy(name, name, None)
