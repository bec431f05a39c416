"""The policies of an evaluation: every preset of ``--kv`` with every budget, and the variations of ``--vary``. A
policy's label is its name in files and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shadowkv.engine.config import refused_policy
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.kvcache.presets import preset

BASELINE = "full"


@dataclass(frozen=True)
class Policy:
    """A policy that answers samples.

    Attributes:
        label: ``kv``, and after an ``@`` the requested budget.
        kv: the preset, and after a colon its changed fields, except the budget.
        spec: the policy with all fields resolved for the model; None if a server has the cache.
    """

    label: str
    kv: str
    spec: KVSpec | None

    def budget(self, length: int) -> float | None:
        """Returns the share of ``length`` tokens of context that a step can select; None if a server has the cache."""
        if self.spec is None:
            return None
        return round(float(self.spec.budget_tokens(np.asarray(length))) / length, 6)


def local_policies(names: Sequence[str], budgets: Sequence[float | int], shape: ModelShape) -> list[Policy]:
    """Returns each policy of ``names`` with each of ``budgets``, without duplicates.

    If a name sets a budget, this budget is used instead of ``budgets``. A policy that selects nothing, such as full
    attention, has no budget. Raises SettingsError for invalid policies.
    """
    from shadowkv.kvcache.parts import resolve  # imported here: it needs PyTorch, and --help does not

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
    """Returns a policy's name or label without a field, and the field's value. The value is None if the policy does not
    set the field."""
    kv, at, budget = name.partition("@")
    preset_name, _, changes = kv.partition(":")
    fields = dict(change.split("=", 1) for change in changes.split(",") if change)
    value = budget if at and field == "budget" else fields.get(field)
    others = [f"{name}={text}" for name, text in fields.items() if name != field]
    kv = f"{preset_name}:{','.join(others)}" if others else preset_name
    return kv if field == "budget" else kv + at + budget, value


def served_policy(name: str) -> Policy:
    """A server's policy, under the user's name for it."""
    return Policy(name, name, None)


@dataclass(frozen=True)
class Variation:
    """An ablation, ``--vary FIELD=V1,V2``: a field of KVSpec and its values, as the user wrote them."""

    field: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Variation:
        """Parses ``FIELD=V1,V2``. Raises ValueError for an unknown field or an invalid value.

        ``expand`` checks whether a value fits a policy and a model.
        """
        field, equals, values = text.partition("=")
        if not equals or not all(values.split(",")):
            raise ValueError(f"{text!r} is not FIELD=V1,V2,...")
        variation = cls(field, tuple(dict.fromkeys(values.split(","))))
        for value in variation.values:
            preset(f"{BASELINE}:{field}={value}")
        return variation

    def expand(self, names: Sequence[str], shape: ModelShape) -> tuple[list[str], list[str]]:
        """Replaces each of ``names`` by one policy per value. Returns the policies, and messages about values that were
        left out.

        Three kinds of policies stay as they are: ``full``, policies that set the field themselves, and policies to
        which no value applies. Raises ValueError if no policy sets the field in the end.
        """
        from shadowkv.kvcache.parts import resolve  # imported here: it needs PyTorch, and --help does not

        expanded: list[str] = []
        notes: list[str] = []
        for name in names:
            if name == BASELINE or without_field(name, self.field)[1] is not None:
                expanded.append(name)
                continue
            variants = [f"{name}{',' if ':' in name else ':'}{self.field}={value}" for value in self.values]
            refused = {}
            for variant in variants:
                try:
                    resolve(preset(variant), shape)
                except ValueError as error:
                    refused[variant] = "; ".join(line.removeprefix("  - ") for line in str(error).splitlines()[1:])
            applicable = [variant for variant in variants if variant not in refused]
            expanded += applicable or [name]
            if applicable:
                notes += [f"{variant} is left out: {reason}" for variant, reason in refused.items()]
            else:
                notes.append(f"{name} stays as it is: {refused[variants[0]]}")
        if not any(without_field(name, self.field)[1] is not None for name in expanded):
            raise ValueError("; ".join([f"--vary {self.field} does not apply to {', '.join(names)}", *notes]))
        return expanded, notes
