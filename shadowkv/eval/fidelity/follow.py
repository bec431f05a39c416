"""Leads policies along the tokens that full attention generates, all from one prefill and in step with it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from shadowkv.eval.fidelity.exact_tails import ExactTails
from shadowkv.eval.fidelity.follower import Follower
from shadowkv.eval.fidelity.measured import Measured
from shadowkv.eval.fidelity.prompts import Prompt
from shadowkv.eval.records.policies import Policy
from shadowkv.eval.running.caches import prefill_all, sequences_that_fit
from shadowkv.kvcache.spec import KVSpec
from shadowkv.models.loader import LoadedModel


def follow(
    loaded: LoadedModel,
    policies: Sequence[Policy],
    prompts: Sequence[Prompt],
    steps: int,
    every: int,
    progress: Callable[[], object] = lambda: None,
    leading: LoadedModel | None = None,
) -> list[Measured]:
    """Figures of all ``policies`` on ``prompts``, which decode together.

    Args:
        loaded: the model of the policies.
        leading: the model whose full attention they follow, with the same tokens and heads; None for their own.
        steps: tokens that full attention generates.
        every: attention is compared at one of ``every`` steps.
        progress: called once per step.
    """
    gc.collect()  # caches of an earlier call and their followers refer to each other
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
    return [one for follower in followers for one in follower.measured(prompts, torch.stack(surprise))]


def prefill_followers(followers: Sequence[Follower], prompt: list[int], capacity: int) -> Tensor:
    """A prompt in a new sequence of every follower, computed once for those of one model; the first one's logits [V] of
    its last token."""
    found = []
    for model in dict.fromkeys(one.runner.model for one in followers):
        storing = [one for one in followers if one.runner.model is model and not isinstance(one.policy, ExactTails)]
        sequences, logits = prefill_all(model, [one.cache for one in storing], prompt, capacity)
        found.append(logits)
        for one, sequence in zip(storing, sequences, strict=True):
            one.sequences.append(sequence)
    for twin, one in pairwise(followers):
        if isinstance(one.policy, ExactTails):  # the one before it is the policy itself
            one.sequences.append(one.cache.load(twin.cache.export(twin.sequences[-1]), capacity))
    return found[0][0]


def prompts_at_once(loaded: LoadedModel, policies: Sequence[Policy], capacity: int) -> int:
    """Number of prompts whose sequences of ``capacity`` tokens fit in memory under full attention and all policies."""
    specs = [policy.spec for policy in policies if policy.spec is not None]
    return sequences_that_fit(loaded, [KVSpec(), *specs], capacity)
