"""``--vary FIELD=V1,V2``: an ablation. Every policy to which the field applies, with each of the values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shadowkv.eval.records.policies import without_field
from shadowkv.eval.reports.summary import BASELINE
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.shape import ModelShape


@dataclass(frozen=True)
class Variation:
    """A field of KVSpec and its values, as the user wrote them."""

    field: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Variation:
        """Reads ``FIELD=V1,V2``; raises ValueError for a field that does not exist and for invalid values of it.

        Whether a value fits a policy and a model is checked separately.
        """
        field, equals, values = text.partition("=")
        if not equals or not all(values.split(",")):
            raise ValueError(f"{text!r} is not FIELD=V1,V2,...")
        variation = cls(field, tuple(dict.fromkeys(values.split(","))))
        for value in variation.values:
            preset(f"{BASELINE}:{field}={value}")
        return variation

    def expand(self, names: Sequence[str], shape: ModelShape) -> tuple[list[str], list[str]]:
        """Policies in place of ``names``, and messages about values that were left out.

        ``full``, policies that set the field themselves, and those to which no value applies stay as they are.
        Raises ValueError if that is all of them.
        """
        from shadowkv.kvcache.parts import resolve  # which imports PyTorch: --help works without

        found: list[str] = []
        notes: list[str] = []
        for name in names:
            if name == BASELINE or without_field(name, self.field)[1] is not None:
                found.append(name)
                continue
            variants = [f"{name}{',' if ':' in name else ':'}{self.field}={value}" for value in self.values]
            refused = {}
            for variant in variants:
                try:
                    resolve(preset(variant), shape)
                except ValueError as error:
                    refused[variant] = "; ".join(line.removeprefix("  - ") for line in str(error).splitlines()[1:])
            left = [variant for variant in variants if variant not in refused]
            found += left or [name]
            if left:
                notes += [f"{variant} is left out: {reason}" for variant, reason in refused.items()]
            else:
                notes.append(f"{name} stays as it is: {refused[variants[0]]}")
        if not any(without_field(name, self.field)[1] is not None for name in found):
            raise ValueError("; ".join([f"--vary {self.field} means nothing to {', '.join(names)}", *notes]))
        return found, notes
