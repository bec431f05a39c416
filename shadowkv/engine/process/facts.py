"""What an engine's process and the one that starts it say to one another, by ``multiprocessing``'s pipes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.request import RequestLimits


@dataclass(frozen=True)
class Launch:
    """What is to be started.

    Attributes:
        compare: policy of a second cache over the same weights.
        folder: for the engines' sockets.
    """

    config: EngineConfig
    compare: str | None
    folder: str


@dataclass(frozen=True)
class EngineFacts:
    """What does not change about an engine that is ready.

    Attributes:
        socket: its name in the folder.
        notes: lines for the start of a server: model, policy, and how many sequences of which length fit where.
        stop_ids: tokens that end an answer.
    """

    socket: str
    notes: list[str]
    model_name: str
    limits: RequestLimits
    stop_ids: frozenset[int]
    sampling_defaults: dict[str, Any]
    config: EngineConfig


@dataclass(frozen=True)
class Left:
    """A process of clients is gone: nobody waits for what it has asked for.

    Attributes:
        client: the name of one of its clients.
    """

    client: str


@dataclass(frozen=True)
class NotStarted:
    """Why there is no engine.

    Attributes:
        kind: ``ValueError``, ``MemoryError`` or ``OSError``, for the settings, the memory and the rest.
    """

    kind: str
    message: str
