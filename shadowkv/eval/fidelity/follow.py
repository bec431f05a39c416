"""Runs policies along the tokens that full attention generates, and measures the policies' losses at each step.
Policies with the same prefill attention share one prefill. A policy can have a twin, which keeps all generated tokens
exact (``ExactTails``)."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.scheduling.quality_meter import kl_divergence
from shadowkv.eval.fidelity.attention_loss import AttentionLoss, Reuse
from shadowkv.eval.fidelity.measured import Measured
from shadowkv.eval.fidelity.observed import Attended, ObservedCache
from shadowkv.eval.fidelity.prompts import Prompt
from shadowkv.eval.records.policies import Policy
from shadowkv.eval.running.caches import figures, open_cache_as, prefill_all, sequences_that_fit
from shadowkv.kvcache.policy.spec import PAGE, KVSpec
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.models.loader import LoadedModel


@dataclass(frozen=True)
class ExactTails(Policy):
    """The twin of a policy. It has a copy of the policy's compressed prompt, and keeps all generated tokens exact.

    The policy's loss minus its twin's loss is the cost of compressing generated tokens. Compressed tokens are projected
    onto the basis of their prompt (ShadowKV+), coded, and found by the index. A policy with a longer
    local window does not show this cost: ``local=1024`` also keeps the last 1,024 tokens of the prompt exact.

    Attributes:
        tokens: number of generated tokens that stay exact; ``spec.local`` includes them.
    """

    tokens: int = 0


def with_exact_tails(policies: Sequence[Policy], tokens: int) -> list[Policy]:
    """Returns ``policies`` with twins added. Each policy that compresses is followed by its twin, which keeps
    ``tokens`` generated tokens exact.

    Raises ValueError if no policy compresses.
    """
    with_twins: list[Policy] = []
    for policy in policies:
        with_twins.append(policy)
        if policy.spec is not None and policy.spec.compresses:
            label, kv = (re.sub("^[^:@]*", r"\g<0>+exact-tails", text) for text in (policy.label, policy.kv))
            with_twins.append(ExactTails(label, kv, replace(policy.spec, local=policy.spec.local + tokens), tokens))
    if len(with_twins) == len(policies):
        raise ValueError(f"--exact-tails has no effect on {', '.join(policy.label for policy in policies)}")
    return with_twins


def acceptance_rate(reference: Tensor, logits: Tensor) -> Tensor:
    """Returns Σ min(p, q), [n], for the next-token distributions p and q of logits [n, V]. This is the probability with
    which speculative sampling from q accepts a draft drawn from p (Leviathan et al., arXiv:2211.17192)."""
    return torch.minimum(*(x.double().softmax(-1) for x in (reference, logits))).sum(-1)


class Follower:
    """A policy's cache and runner, whose sequences follow given tokens.

    Args:
        prompts: the prompts, all of the same length, one sequence each.
        capacity: maximum number of tokens of a sequence.
        exact: full attention's cache, into which every token is decoded first; None for full attention itself.
    """

    def __init__(
        self, loaded: LoadedModel, policy: Policy, prompts: Sequence[Prompt], capacity: int, exact: ObservedCache | None
    ) -> None:
        assert policy.spec is not None, "the policy is local"
        self.policy, rows = policy, len(prompts)
        if isinstance(policy, ExactTails):
            capacity += policy.tokens  # so that the twin has as many compressed pages as its policy
        self.cache = open_cache_as(ObservedCache, loaded, policy.spec, capacity, rows)
        self.runner = Runner(loaded.model, self.cache)
        self.sequences: list[CachedSequence] = []
        self.kl: list[Tensor] = []
        self.acceptance: list[Tensor] = []
        self.agrees: list[Tensor] = []
        self.surprise: list[Tensor] = []
        self.measuring = False
        if exact is not None:
            shape, spec = self.cache.shape, self.cache.spec
            chunks = (spec.compressed_pages(capacity) + 1) * PAGE // spec.chunk
            self.loss = AttentionLoss(exact, self.cache, rows)
            self.reuse = Reuse(shape.num_layers, rows, shape.num_kv_heads, chunks, self.cache.device)
            self.cache.observe = self._observe

    def decode(self, tokens: list[int]) -> Tensor:
        """Appends each sequence's next token. Returns the logits [B, V] after these tokens, for B sequences."""
        return self.runner.decode(self.sequences, tokens)

    def follow(self, tokens: list[int], reference: Tensor, measuring: bool) -> None:
        """Appends the next tokens, and compares the resulting logits with full attention's.

        Args:
            reference: full attention's logits [B, V] after the same tokens.
            measuring: whether attention is compared in this step, too.
        """
        self.measuring = measuring
        logits = self.decode(tokens)
        chosen = reference.argmax(-1)
        self.kl.append(kl_divergence(reference, logits))
        self.acceptance.append(acceptance_rate(reference, logits))
        self.agrees.append(logits.argmax(-1) == chosen)
        self.surprise.append(-logits.log_softmax(-1).gather(-1, chosen[:, None]).squeeze(-1))

    def _observe(self, seen: Attended) -> None:
        if self.measuring:
            self.loss.take(seen)
        if seen.selected is not None and self.cache.spec.selects:
            self.reuse.take(seen.layer, seen.selected)

    def measured(self, prompts: Sequence[Prompt], surprise: Tensor) -> Iterator[Measured]:
        """Yields the policy's results on every prompt.

        Args:
            surprise: full attention's negative log-probabilities of the same tokens, [steps, B].
        """
        kl, agrees, own = torch.stack(self.kl), torch.stack(self.agrees).float(), torch.stack(self.surprise)
        acceptance = torch.stack(self.acceptance)
        recall, error, hits = self.loss.mass_recall(), self.loss.output_error(), self.reuse.hit_rates()
        for row, (prompt, sequence) in enumerate(zip(prompts, self.sequences, strict=True)):
            diagnostics = figures(self.cache, sequence)
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
                acceptance_rates=[round(rate, 6) for rate in acceptance[:, row].tolist()],
                perplexity=float(own[:, row].mean().exp()),
                full_perplexity=float(surprise[:, row].mean().exp()),
                attended_tokens=int(diagnostics["attended_tokens"]),
                least_kept_energy=diagnostics.get("least_kept_energy"),
                mass_recall=recall[:, row].tolist(),
                output_error=error[:, row].tolist(),
                hit_rates=None if hits is None else hits[:, :, row].tolist(),
            )


def follow(
    loaded: LoadedModel,
    policies: Sequence[Policy],
    prompts: Sequence[Prompt],
    steps: int,
    every: int,
    progress: Callable[[], object] = lambda: None,
    leading: LoadedModel | None = None,
) -> list[Measured]:
    """Returns the results of all ``policies`` on ``prompts``. The prompts are decoded together.

    Args:
        loaded: the model that the policies run on.
        leading: the model that generates the continuations with full attention; it needs the same tokenizer and
            attention heads as ``loaded``. None means ``loaded`` itself.
        steps: number of tokens that full attention generates.
        every: number of steps from one comparison of attention to the next.
        progress: called once per step.
    """
    gc.collect()  # frees an earlier call's caches and followers, which form cycles
    capacity = len(prompts[0].tokens) + steps
    full = Follower(leading or loaded, Policy("full", "full", KVSpec()), prompts, capacity, None)
    followers = [Follower(loaded, policy, prompts, capacity, full.cache) for policy in policies]
    logits = [prefill_followers((full, *followers), prompt.tokens, capacity) for prompt in prompts]
    tokens, surprise = torch.stack(logits).argmax(-1).tolist(), []
    for step in range(steps):
        reference = full.decode(tokens)
        for follower in followers:
            follower.follow(tokens, reference, step % every == 0)
        best = reference.log_softmax(-1).max(-1)
        surprise.append(-best.values)
        tokens = best.indices.tolist()
        progress()
    return [result for follower in followers for result in follower.measured(prompts, torch.stack(surprise))]


def prefill_followers(followers: Sequence[Follower], prompt: list[int], capacity: int) -> Tensor:
    """Adds a sequence with the prompt to every follower. Each model computes the prompt once per kind of prefill
    attention. Returns the first follower's logits [V] of the prompt's last token."""
    logits_by_model = []
    for model in dict.fromkeys(follower.runner.model for follower in followers):
        storing = [
            follower
            for follower in followers
            if follower.runner.model is model and not isinstance(follower.policy, ExactTails)
        ]
        sequences, logits = prefill_all(model, [follower.cache for follower in storing], prompt, capacity)
        logits_by_model.append(logits)
        for follower, sequence in zip(storing, sequences, strict=True):
            follower.sequences.append(sequence)
    for twin, follower in pairwise(followers):
        if isinstance(follower.policy, ExactTails):  # here ``twin`` is the policy that it belongs to
            follower.sequences.append(
                follower.cache.snapshots.load(twin.cache.snapshots.export(twin.sequences[-1]), capacity)
            )
    return logits_by_model[0][0]


def prompts_at_once(loaded: LoadedModel, policies: Sequence[Policy], capacity: int) -> int:
    """Returns how many prompts fit in memory, each with ``capacity`` tokens under full attention and every policy."""
    specs = [policy.spec for policy in policies if policy.spec is not None]
    return sequences_that_fit(loaded, [KVSpec(), *specs], capacity)
