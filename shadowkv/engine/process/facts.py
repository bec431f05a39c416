"""What an engine's process and the one that starts it say to one another, by ``multiprocessing``'s pipes."""

from __future__ import annotations

import pickle
import runpy
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.request import RequestLimits
from shadowkv.kvcache import codecs, parts, presets
from shadowkv.kvcache.parts.base import Part
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.ops.codec import LatentCodec, RowCodec


@dataclass(frozen=True)
class Registered:
    """Parts, presets and codecs that are registered here and not of shadowkv, for a process that has not done that."""

    parts: dict[str, dict[str, type[Part]]]
    presets: dict[str, KVSpec]
    codecs: list[RowCodec | LatentCodec]

    @classmethod
    def here(cls) -> Registered:
        """Those of this process."""
        own = {name: spec for name, spec in presets.PRESETS.items() if name not in presets.OURS}
        known: list[RowCodec | LatentCodec] = [*codecs.ROW_CODECS.values(), *codecs.LATENT_CODECS.values()]
        named = {
            axis: {name: part for name, part in of_axis.items() if _is_named(part)}
            for axis, of_axis in parts.REGISTERED.items()
        }
        others = [codec for codec in known if not any(codec is ours for ours in codecs.OURS) and _is_named(codec)]
        return cls(named, own, others)

    def register(self) -> None:
        """Registers them in this process, where nothing is registered."""
        for codec in self.codecs:
            codecs.register(codec)
        for axis, of_axis in self.parts.items():
            for name, part in of_axis.items():
                parts.register(axis, name, part)
        for name, spec in self.presets.items():
            presets.register(name, spec)


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
    registered: Registered = field(default_factory=Registered.here)


def script() -> str | None:
    """The file that this process runs as a script, whose classes others know as its ``__main__``'s; None where it runs
    a module, which they can import."""
    main = sys.modules["__main__"]
    return None if getattr(main, "__spec__", None) is not None else getattr(main, "__file__", None)


def run_script(path: str) -> None:
    """Makes what a script defines known here as it is there, without its ``if __name__ == "__main__"`` part, as
    ``multiprocessing`` does."""
    module = ModuleType("__mp_main__")
    module.__dict__.update(runpy.run_path(path, run_name="__mp_main__"))
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


@dataclass(frozen=True)
class EngineFacts:
    """What does not change about an engine that is ready.

    Attributes:
        socket: its name in the folder.
        notes: lines for the start of a server: model, policy, and how many sequences of which length fit where.
        stop_ids: tokens that end an answer.
        model_path: the model's file or folder, or what it was asked for by where its weights are dummies.
        max_concurrency: how many sequences of the model's length the KV cache has room for at once.
        advice: what is to be expected of a model that is too small to answer well; None for others.
    """

    socket: str
    notes: list[str]
    model_name: str
    limits: RequestLimits
    stop_ids: frozenset[int]
    sampling_defaults: dict[str, Any]
    config: EngineConfig
    model_path: str
    max_concurrency: float
    advice: str | None = None


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


def _is_named(value: object) -> bool:
    """Whether another process can be told of it: a class within a function has no name there."""
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True
