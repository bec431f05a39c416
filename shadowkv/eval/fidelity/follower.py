"""A policy that follows tokens chosen by full attention, and what it loses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shadowkv.engine.execution.runner import Runner
from shadowkv.eval.fidelity.attention import AttentionLoss
from shadowkv.eval.fidelity.exact_tails import ExactTails
from shadowkv.eval.fidelity.measured import Measured
from shadowkv.eval.fidelity.observed import Attended, ObservedCache
from shadowkv.eval.fidelity.prompts import Prompt
from shadowkv.eval.fidelity.reuse import Reuse
from shadowkv.eval.records.policies import Policy
from shadowkv.eval.running.caches import figures, open_cache_as
from shadowkv.kvcache.sequence import CachedSequence
from shadowkv.kvcache.spec import PAGE
from shadowkv.models.loader import LoadedModel


def kl_divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """KL(reference || logits) in nats, [n], of the distributions of logits [n, V]."""
    wanted, found = (x.double().log_softmax(-1) for x in (reference, logits))  # in float32 small ones become negative
    return (wanted.exp() * (wanted - found)).sum(-1)


class Follower:
    """A policy that follows tokens that it does not choose.

    Args:
        prompts: number of sequences, all of the same length.
        capacity: tokens of a sequence at the end.
        exact: full attention's cache, which decodes every token first; None for full attention itself.
    """

    def __init__(
        self, loaded: LoadedModel, policy: Policy, prompts: Sequence[Prompt], capacity: int, exact: ObservedCache | None
    ) -> None:
        assert policy.spec is not None, "the policy is local"
        self.policy, rows = policy, len(prompts)
        if isinstance(policy, ExactTails):
            capacity += policy.tokens  # for the same number of sealed pages as its twin has
        self.cache = open_cache_as(ObservedCache, loaded, policy.spec, capacity, rows)
        self.runner = Runner(loaded.model, self.cache)
        self.sequences: list[CachedSequence] = []
        self.kl: list[Tensor] = []
        self.agrees: list[Tensor] = []
        self.surprise: list[Tensor] = []
        self.measuring = False
        if exact is not None:
            shape, spec = self.cache.shape, self.cache.spec
            chunks = (spec.sealed_pages(capacity) + 1) * PAGE // spec.chunk
            self.loss = AttentionLoss(exact, self.cache, rows)
            self.reuse = Reuse(shape.num_layers, rows, shape.num_kv_heads, chunks, self.cache.device)
            self.cache.observe = self._observe

    def decode(self, tokens: list[int]) -> Tensor:
        """Takes every sequence's next token; logits [B, V] of the one after it."""
        return self.runner.decode(self.sequences, tokens)

    def follow(self, tokens: list[int], reference: Tensor, measuring: bool) -> None:
        """Takes the next tokens and compares with full attention's logits [B, V] of those after them.

        Args:
            measuring: whether its attention is compared too.
        """
        self.measuring = measuring
        logits = self.decode(tokens)
        chosen = reference.argmax(-1)
        self.kl.append(kl_divergence(reference, logits))
        self.agrees.append(logits.argmax(-1) == chosen)
        self.surprise.append(-logits.log_softmax(-1).gather(-1, chosen[:, None]).squeeze(-1))

    def _observe(self, seen: Attended) -> None:
        if self.measuring:
            self.loss.take(seen)
        if seen.selected is not None and self.cache.spec.selects:
            self.reuse.take(seen.layer, seen.selected)

    def measured(self, prompts: Sequence[Prompt], surprise: Tensor) -> Iterator[Measured]:
        """Its figures on every prompt.

        Args:
            surprise: full attention's own surprise at the same tokens, [steps, B].
        """
        kl, agrees, own = torch.stack(self.kl), torch.stack(self.agrees).float(), torch.stack(self.surprise)
        recall, error, hits = self.loss.mass_recall(), self.loss.output_error(), self.reuse.hit_rates()
        for row, (prompt, sequence) in enumerate(zip(prompts, self.sequences, strict=True)):
            found = figures(self.cache, sequence)
            budget = self.policy.budget(len(prompt.tokens))
            assert budget is not None, "the policy is local"
            yield Measured(
                prompt=prompt.name,
                policy=self.policy.label,
                kv=self.policy.kv,
                budget=budget,
                steps=len(kl),
                mean_kl=float(kl[:, row].mean()),
                max_kl=float(kl[:, row].max()),
                top1_agreement=float(agrees[:, row].mean()),
                perplexity=float(own[:, row].mean().exp()),
                full_perplexity=float(surprise[:, row].mean().exp()),
                attended_tokens=int(found["attended_tokens"]),
                least_kept_energy=found.get("least_kept_energy"),
                mass_recall=recall[:, row].tolist(),
                output_error=error[:, row].tolist(),
                hit_rates=None if hits is None else hits[:, :, row].tolist(),
            )
