"""Messages between an engine's process (``main.py``) and the process that starts it (``launch.py``), sent through a
``multiprocessing`` connection."""

from __future__ import annotations

import pickle
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.request import RequestLimits
from shadowkv.kvcache import codecs, parts, presets
from shadowkv.kvcache.parts.base import Part
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.ops import registry
from shadowkv.ops.codec import LatentCodec, RowCodec


@dataclass(frozen=True)
class Registered:
    """Parts, presets, codecs and backends of ops that user code has registered in this process, to be registered in the
    engine's process.

    Attributes:
        backends: arguments of ``shadowkv.ops.registry.register``. A module is given by its name, because it cannot be
            pickled.
    """

    parts: dict[str, dict[str, type[Part]]]
    presets: dict[str, KVSpec]
    codecs: list[RowCodec | LatentCodec]
    backends: list[tuple[str, str, str | Callable[..., Any], tuple[str, ...], bool]]

    @classmethod
    def here(cls) -> Registered:
        """The registrations of this process."""
        specs = {name: spec for name, spec in presets.PRESETS.items() if name not in presets.OURS}
        known: list[RowCodec | LatentCodec] = [*codecs.ROW_CODECS.values(), *codecs.LATENT_CODECS.values()]
        named = {
            axis: {name: part for name, part in of_axis.items() if _is_named(part)}
            for axis, of_axis in parts.REGISTERED.items()
        }
        others = [codec for codec in known if not any(codec is ours for ours in codecs.OURS) and _is_named(codec)]
        backends = [
            (
                call,
                name,
                module.__name__ if isinstance(module := one.module, ModuleType) else module,
                one.device_types,
                one.preferred,
            )
            for call, of_call in registry.REGISTERED.items()
            for name, one in of_call.items()
        ]
        return cls(named, specs, others, [backend for backend in backends if _is_named(backend)])

    def register(self) -> None:
        """Registers everything in this process, which must have no registrations of its own."""
        for codec in self.codecs:
            codecs.register(codec)
        for axis, of_axis in self.parts.items():
            for name, part in of_axis.items():
                parts.register(axis, name, part)
        for name, spec in self.presets.items():
            presets.register(name, spec)
        for call, name, backend, device_types, preferred in self.backends:
            module = import_module(backend) if isinstance(backend, str) else backend
            registry.register(call, name, module, device_types=device_types, preferred=preferred)


@dataclass(frozen=True)
class Launch:
    """What a new process needs to start an engine.

    Attributes:
        compare: policy of a second engine on the same weights; None for one engine.
        folder: folder of the engines' sockets.
        replica: number of the engine among several on this machine, and their count; None if it is the only one.
        registered: registrations for the engine's process.
    """

    config: EngineConfig
    compare: str | None
    folder: str
    replica: tuple[int, int] | None = None
    registered: Registered = field(default_factory=Registered.here)


def script() -> str | None:
    """Returns the path of the script that this process runs. Another process needs it to unpickle the script's classes.
    Returns None if this process runs a module, which the other process can import."""
    main = sys.modules["__main__"]
    return None if getattr(main, "__spec__", None) is not None else getattr(main, "__file__", None)


def run_script(path: str) -> None:
    """Runs a script as this process's ``__main__``, without its ``if __name__ == "__main__"`` part, as
    ``multiprocessing`` does."""
    module = ModuleType("__mp_main__")
    module.__dict__.update(runpy.run_path(path, run_name="__mp_main__"))
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


@dataclass(frozen=True)
class EngineFacts:
    """Facts about a loaded engine, which do not change.

    Attributes:
        socket: the socket's name in the folder.
        notes: lines for a server's start: the model, the policy, and how many sequences of which length fit.
        model_path: the model's file or folder; with dummy weights the ``model`` setting.
        max_concurrency: number of sequences of the maximum length that fit into the KV cache at once.
        advice: a note for models that are too small to answer well; None for others.
    """

    socket: str
    notes: list[str]
    model_name: str
    limits: RequestLimits
    sampling_defaults: dict[str, Any]
    config: EngineConfig
    model_path: str
    max_concurrency: float
    advice: str | None = None


@dataclass(frozen=True)
class Left:
    """A serving process has ended: the engine must abort its requests.

    Attributes:
        client: name of the process's client.
    """

    client: str


@dataclass(frozen=True)
class NotStarted:
    """The engine has not started.

    Attributes:
        kind: name of the error's class: ``ValueError`` for bad settings, ``MemoryError``, or ``OSError`` for the rest.
    """

    kind: str
    message: str


def _is_named(value: object) -> bool:
    """Whether ``value`` can be pickled for another process. A class defined in a function cannot."""
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True
