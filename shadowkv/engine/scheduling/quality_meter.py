"""``QualityMeter``: measures whether a policy's budget is enough, while requests are served. ``DecodeSteps`` uses it.

For some steps the meter first computes a narrow step: a draft step (``GroupPlan``) of the same tokens, which selects a
quarter of the budget. Its tokens are removed again, and the step follows as always. So answers do not depend on the
meter. The further the next-token distributions of both are apart, the further the policy is from full attention
(docs/operators.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.outputs import CheckedTokens
from shadowkv.engine.scheduling.scheduler import Running
from shadowkv.engine.scheduling.sparse_drafts import cut_back, is_compressed
from shadowkv.kvcache.memory.streams import upload

CHECKED = 8
"""Maximum number of sequences in a narrow step. Two distributions of each are compared, which takes a few megabytes of
memory for each sequence."""


def kl_divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """Returns KL(reference || logits) in nats, float64 [n], of the distributions given by logits [n, V]; V is the size
    of the vocabulary."""
    log_p, log_q = (x.double().log_softmax(-1) for x in (reference, logits))  # float32 makes small KLs negative
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@dataclass(frozen=True)
class Checked:
    """``kl`` float64 [n], KL(step || narrow step) of n sequences, on the host. ``rows`` are their numbers in the
    step."""

    rows: list[int]
    kl: Tensor


@dataclass(frozen=True)
class NarrowStep:
    """A narrow step with its logits, float32 [n, V]. ``rows`` are the n numbers of its sequences in the step that
    follows."""

    rows: list[int]
    logits: Tensor

    def compared(self, logits: Tensor, first_rows: Sequence[int]) -> Checked | None:
        """Compares the step that follows. The results are on the host when the device has reached a mark that is made
        after this call. Returns None if memory runs out.

        Args:
            logits: of the step that follows, float32 [B, V].
            first_rows: for each sequence of that step, its first row in ``logits``.
        """
        try:
            rows = upload(torch.tensor([first_rows[row] for row in self.rows]), logits.device)
            kl = kl_divergence(logits[rows], self.logits)
            if kl.is_cuda:
                kl = torch.empty(kl.shape, dtype=kl.dtype, pin_memory=True).copy_(kl, non_blocking=True)
        except torch.OutOfMemoryError:
            return None
        return Checked(self.rows, kl)


class QualityMeter:
    """Computes narrow steps.

    Args:
        rate: share of all steps that a narrow step precedes.

    Attributes:
        checked: checked tokens since the start, for ``/metrics``.
    """

    def __init__(self, runner: Runner, rate: float) -> None:
        self._runner, self._rate = runner, rate
        self._due = 0.0
        self._next = 0
        self.checked = CheckedTokens()

    def narrow(self, running: Sequence[Running], tokens: Sequence[int], sources: Sequence[int]) -> NarrowStep | None:
        """Computes a narrow step before a step of ``running``. Returns None if none is due, no sequence is compressed,
        or memory runs out.

        Only compressed sequences are checked, at most ``CHECKED``. Narrow steps take turns if there are more.

        Args:
            tokens, sources: of the step that follows, as for ``Runner.decode``.
        """
        able = [row for row, one in enumerate(running) if is_compressed(one.sequence)]
        self._due += self._rate if able else 0
        if self._due < 1:
            return None
        self._due -= 1
        start = self._next % len(able)
        rows = (able[start:] + able[:start])[:CHECKED]
        self._next = start + len(rows)
        sequences = [running[row].sequence for row in rows]
        lengths = [sequence.length for sequence in sequences]
        newest, places = [tokens[row] for row in rows], [sources[row] for row in rows]
        try:
            logits = self._runner.decode(sequences, newest, places, None, (), (), True).clone()
        except torch.OutOfMemoryError:
            if self._runner.model.group.size > 1:  # other ranks may have run the step
                raise
            return None
        finally:
            cut_back(self._runner.cache, sequences, lengths)
        return NarrowStep(rows, logits)

    def take(self, running: Sequence[Running | None], kl: Sequence[float]) -> None:
        """Counts checked tokens of sequences. None stands for a sequence that has ended."""
        for one, of_token in zip(running, kl, strict=True):
            if one is not None and math.isfinite(of_token):
                self.checked.add(of_token)
                one.request.checked.add(of_token)
