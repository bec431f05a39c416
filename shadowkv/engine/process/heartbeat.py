"""``Heartbeat``: knows whether an engine that is alive also answers, from a question that its client repeats."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from shadowkv.engine.engine import EngineStats
from shadowkv.engine.process import messages

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
"""Seconds between two beats."""

MISSED_BEATS = 5
"""An engine is stuck if it leaves a question unanswered for this number of beats. Beats are counted instead of seconds,
so that the pauses of a client that is itself stopped or busy do not count."""

STEP_SECONDS = 300.0
"""An engine is stuck if its step takes this long: its device hangs. vLLM waits as long
(``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS``). A step takes less than a second on a GPU and seconds on a CPU, but the first
one of a shape can compile kernels."""


class Heartbeat:
    """Asks an engine for its statistics once every ``BEAT_SECONDS``, on an event loop. An engine reads messages on a
    thread that does not wait for steps, so it answers even if its device hangs.

    Args:
        engine: the engine's name in the log.
        ask: sends the question and returns its number; None if the engine has ended.

    Attributes:
        asked: number of the question that the engine has not answered; None if there is none.
        latest: the engine's latest statistics; None before it has answered.
    """

    def __init__(self, engine: str, ask: Callable[[], int | None]) -> None:
        self._engine, self._ask = engine, ask
        self.asked: int | None = None
        self.latest: EngineStats | None = None
        self._missed, self._was_stuck = 0, False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_unanswered(self) -> bool:
        """Whether the engine does not answer messages."""
        return self._missed >= MISSED_BEATS

    @property
    def is_stuck(self) -> bool:
        """Whether the engine does not answer messages, or does not end its step."""
        return self.is_unanswered or (self.latest is not None and self.latest.step_seconds >= STEP_SECONDS)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Asks from now on."""
        self.stop()
        self._beat(loop)

    def stop(self) -> None:
        """Asks no more, and forgets what was not answered."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.asked, self._missed = None, None, 0

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.asked is not None:
            self._missed += 1
            self._log()
        elif (number := self._ask()) is None:
            return
        else:
            self.asked = number
        self._timer = loop.call_later(BEAT_SECONDS, self._beat, loop)

    def answer(self, value: msgspec.Raw) -> None:
        """Takes the engine's answer to the question ``asked``."""
        self.asked, self._missed = None, 0
        self.latest = messages.decode_reply(value, EngineStats)
        self._log()

    def _log(self) -> None:
        if self.is_stuck == self._was_stuck:
            return
        self._was_stuck = self.is_stuck
        if self.is_unanswered:
            logger.warning("%s is stuck: it has not answered for %g s", self._engine, self._missed * BEAT_SECONDS)
        elif self.is_stuck:
            logger.warning("%s is stuck: a step has not ended for %g s", self._engine, STEP_SECONDS)
        else:
            logger.warning("%s is no longer stuck", self._engine)
