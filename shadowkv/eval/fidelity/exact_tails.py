"""Twins of policies that keep all generated tokens exact, beside the same compressed prompt.

What sealing costs: projecting generated tokens onto the basis of their prompt (ShadowKV+), coding them, and leaving it
to the index to find them. A longer window does not show that: ``local=1024`` keeps the last 1,024 tokens of the prompt
exact too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shadowkv.eval.records.policies import Policy


@dataclass(frozen=True)
class ExactTails(Policy):
    """Takes over prompts as its twin without exact tails has stored them.

    Attributes:
        tokens: number of generated tokens that stay exact; ``spec.local`` includes them.
    """

    tokens: int = 0


def with_exact_tails(policies: Sequence[Policy], tokens: int) -> list[Policy]:
    """All ``policies``, and after each that ever seals, its twin for ``tokens`` generated tokens.

    Raises ValueError where none does.
    """
    found: list[Policy] = []
    for policy in policies:
        found.append(policy)
        if policy.spec is not None and policy.spec.seals:
            label, kv = (re.sub("^[^:@]*", r"\g<0>+exact-tails", text) for text in (policy.label, policy.kv))
            found.append(ExactTails(label, kv, replace(policy.spec, local=policy.spec.local + tokens), tokens))
    if len(found) == len(policies):
        raise ValueError(f"--exact-tails means nothing to {', '.join(policy.label for policy in policies)}")
    return found
