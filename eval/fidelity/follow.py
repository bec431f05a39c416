"""Policies are led along the tokens that full attention generates, all from one prefill and in step with it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

from shadowkv.eval.caches import sequences_that_fit
from shadowkv.eval.copies import prefill_all
from shadowkv.eval.fidelity.follower import Follower
from shadowkv.eval.fidelity.measured import Measured
from shadowkv.eval.fidelity.texts import Prompt
from shadowkv.eval.policies import Policy
from shadowkv.kvcache.spec import KVSpec
from shadowkv.models.loader import LoadedModel


def follow(
    loaded: LoadedModel,
    policies: Sequence[Policy],
    prompts: Sequence[Prompt],
    steps: int,
    every: int,
    progress: Callable[[], object] = lambda: None,
) -> list[Measured]:
    """Figures of all ``policies`` on ``prompts``, which decode together.

    Args:
        steps: tokens that full attention generates.
        every: attention is compared at one of so many steps.
        progress: called once a step.
    """
    gc.collect()  # caches of a call before and their followers name each other
    capacity = len(prompts[0].tokens) + steps
    full = Follower(loaded, Policy("full", "full", KVSpec()), prompts, capacity, None)
    followers = [Follower(loaded, policy, prompts, capacity, full.cache) for policy in policies]
    logits = []
    for row, prompt in enumerate(prompts):
        opened = [(one.cache, one.sequences[row]) for one in (full, *followers)]
        logits.append(prefill_all(full.runner, opened, prompt.tokens))
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


def prompts_at_once(loaded: LoadedModel, policies: Sequence[Policy], capacity: int) -> int:
    """Prompts whose sequences of ``capacity`` tokens the memory holds under full attention and all ``policies``."""
    specs = [policy.spec for policy in policies if policy.spec is not None]
    return sequences_that_fit(loaded, [KVSpec(), *specs], capacity)
