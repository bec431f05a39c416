"""Plugins: installed packages that register parts, codecs and presets of their own, found by their entry points.

    [project.entry-points."shadowkv.plugins"]
    mine = "my_package.policies:register"

They are loaded when a policy names what shadowkv itself does not have, in each process that reads that policy.
"""

from __future__ import annotations

import re
import threading
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

GROUP = "shadowkv.plugins"
"""The group of entry points: each names a function, which is called without arguments, or a module, which is
imported."""


class PluginError(ValueError):
    """A plugin could not be loaded; the message names it."""


def checked_name(name: str) -> str:
    """``name``, if a policy's text can have it (``turbo:index=mine,chunk=8``); raises ValueError otherwise."""
    if not re.fullmatch(r"[\w.+-]+", name):
        raise ValueError(f"{name!r} is no name: it may have letters, digits and . + - _ alone, as in policies' texts")
    return name


_lock = threading.RLock()
_outcome: list[PluginError | None] = []
"""What loading came to, None for success; empty where it has not begun."""


def load_plugins() -> None:
    """Loads every plugin that is installed, once in a process.

    Raises:
        PluginError: some could not be loaded, again in every call; the others are.
    """
    with _lock:
        if not _outcome:
            _outcome.append(None)  # a plugin that reads a policy itself finds what is registered so far
            _outcome[0] = _load_all()
        if _outcome[0] is not None:
            raise PluginError(str(_outcome[0])) from _outcome[0]


def _load_all() -> PluginError | None:
    error, reasons = None, []
    for plugin in sorted(set(entry_points(group=GROUP)), key=lambda plugin: (plugin.name, plugin.value)):
        try:
            _load(plugin)
        except Exception as found:
            reasons.append(f"plugin {plugin.name!r} ({plugin.value}) cannot be loaded: {type(found).__name__}: {found}")
            error = PluginError("; ".join(reasons))
            error.__cause__ = found
    return error


def _load(plugin: EntryPoint) -> None:
    target = plugin.load()
    if callable(target):
        target()
    elif not isinstance(target, ModuleType):
        raise TypeError("it is neither a function nor a module")
