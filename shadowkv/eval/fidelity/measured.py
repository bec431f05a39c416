"""The results of one policy on one prompt: an entry of fidelity.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shadowkv.eval.fidelity.prompts import kind_of
from shadowkv.eval.records.predictions import write_json


@dataclass(frozen=True)
class Measured:
    """Results along the tokens that full attention generates after a prompt.

    Attributes:
        prompt: name of the text that the prompt was cut from, and position in this text.
        policy: label of the policy: ``kv``, and after an ``@`` the requested budget.
        kv: the preset, and after a colon its changed fields, except the budget.
        budget: share of the prompt that a step can select.
        steps: number of tokens at which next-token distributions are compared.
        mean_kl, max_kl: KL(full || policy) in nats per token.
        top1_agreement: share of steps at which the policy and full attention rank the same token first.
        acceptance_rates: per step, the probability that full attention accepts a token drafted by the policy,
            Σ min(p, q) over the vocabulary.
        perplexity, full_perplexity: the policy's and full attention's perplexity on the generated tokens.
        attended_tokens: tokens that a kv head attends to in the last step.
        least_kept_energy: smallest share of the keys' energy that a layer kept, if keys are low-rank.
        mass_recall: per layer, share of the exact attention mass that is on tokens that the policy read.
        output_error: per layer, relative error of attention's output.
        hit_rates: per buffer size, then per layer (``Reuse``). None if no step selected chunks.
    """

    prompt: str
    policy: str
    kv: str
    budget: float
    steps: int
    mean_kl: float
    max_kl: float
    top1_agreement: float
    acceptance_rates: list[float]
    perplexity: float
    full_perplexity: float
    attended_tokens: int
    least_kept_energy: float | None
    mass_recall: list[float]
    output_error: list[float]
    hit_rates: list[list[float]] | None

    @property
    def perplexity_difference(self) -> float:
        """The policy's perplexity minus full attention's."""
        return self.perplexity - self.full_perplexity


def read_measured(path: Path) -> list[Measured]:
    """Returns the results of earlier runs, or an empty list if there is no file. Raises ValueError if the file has
    another form."""
    if not path.exists():
        return []
    try:
        return [Measured(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} has no results that this version can read: {error}") from error


def write_measured(path: Path, measured: Iterable[Measured]) -> None:
    """Replaces the file ``path`` with one that contains the results."""
    write_json(path, [asdict(result) for result in measured])


def of_policy(measured: Iterable[Measured], label: str) -> list[Measured]:
    """The results of one policy."""
    return [result for result in measured if result.policy == label]


def by_kind(measured: Iterable[Measured]) -> dict[str, list[Measured]]:
    """The results by kind of text, in order of appearance."""
    kinds: dict[str, list[Measured]] = {}
    for result in measured:
        kinds.setdefault(kind_of(result.prompt), []).append(result)
    return kinds


def labels(measured: Sequence[Measured]) -> list[str]:
    """Labels of the policies in order of appearance."""
    return list(dict.fromkeys(result.policy for result in measured))
