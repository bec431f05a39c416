"""Makes the object that drafts tokens, as the config says. ``Engine`` calls it."""

from __future__ import annotations

import logging

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.execution.head_runner import HeadRunner
from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.scheduling.head_drafts import HeadDrafts
from shadowkv.engine.scheduling.scheduler import Scheduler
from shadowkv.engine.scheduling.sparse_drafts import SparseDrafts
from shadowkv.engine.speculation.speculation import Speculation, TextDrafts
from shadowkv.engine.startup.sizing import kept_states

logger = logging.getLogger(__name__)


def open_speculation(
    config: EngineConfig, runner: Runner, head: HeadRunner | None, scheduler: Scheduler
) -> Speculation | None:
    """Returns the object that drafts tokens; None without speculative decoding.

    Args:
        runner: runs the model.
        head: runs the model's draft head; None without one.
    """
    drafts, rows = config.speculation, config.max_rows
    if drafts is None:
        return None
    if drafts.conditional_rates is not None:
        logger.warning(
            "rejection_sample_method='synthetic': drafted tokens are accepted at random, so answers are not the "
            "model's; use it only to measure speed"
        )
    if head is not None:
        return HeadDrafts(drafts, rows, head, scheduler, kept_states(config.drafted_tokens))
    if drafts.method == "sparse":
        return SparseDrafts(drafts, rows, runner)
    return TextDrafts(drafts, rows, runner.cache.layout.most_drafted)
