"""Prompts that one server computes and another continues, through the directory that both share.

If anything goes wrong on the way, nothing fails: what does not arrive is computed.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from typing import TYPE_CHECKING

from shadowkv.engine.request import Request
from shadowkv.prefix_cache.protocol import Answer, NotDone, Saved, SaveError, settle

if TYPE_CHECKING:
    from shadowkv.engine.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

SENDING_SECONDS = 30.0
"""How long the answer to a prompt that another server continues waits for the disk."""


async def send(engine: AsyncEngine, request: Request) -> tuple[str, ...]:
    """Waits until what is cached of the prompt of a request that has been served is on the disk.

    Returns the names of its snapshots; none if it does not get there or ``engine`` has the decode role. Raises
    EngineDead.
    """
    pages = [] if request.prompt is None else request.prompt.shareable
    if engine.role == "decode" or engine.engine.config.kv_disk_dir is None or not pages:
        return ()

    def begin(answer: Answer) -> None:
        saves = engine.engine.saves
        if saves is None:
            settle(answer, NotDone("the tiers below the device have failed"))
        else:
            saves.save(None, pages, answer)

    try:
        saved: Saved = await engine.ask(begin, SENDING_SECONDS)
    except (SaveError, asyncio.TimeoutError) as error:
        reason = str(error) or f"the disk has not taken it within {SENDING_SECONDS:g} s"
        logger.warning("a prompt of %d tokens is not handed over: %s", len(request.prompt_token_ids), reason)
        return ()
    return saved.snapshots


async def receive(engine: AsyncEngine, names: tuple[str, ...], tokens: int) -> None:
    """Waits until snapshots of prompts of ``tokens`` that another server has written, or is about to, are known here:
    at most as long as computing them would take, within bounds. Raises EngineDead."""
    if engine.role == "prefill" or engine.engine.config.kv_disk_dir is None or not names:
        return

    def begin(answer: Future[bool]) -> None:
        lower = engine.engine.scheduler.prefix_cache.lower
        if lower is None or lower.handovers is None:  # they have failed
            settle(answer, False)
        else:
            lower.handovers.expect(names, tokens, answer)

    if not await engine.ask(begin):
        logger.warning("prompts of %d tokens have not arrived in time: what is not there is computed", tokens)
