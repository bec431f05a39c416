"""Plugins: installed packages that register their own parts, codecs and presets. Entry points name them.

    [project.entry-points."shadowkv.plugins"]
    mine = "my_package.policies:register"

They are loaded when a policy has a name that shadowkv does not know, in each process that reads the policy.
"""

from __future__ import annotations

import re
import threading
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

GROUP = "shadowkv.plugins"
"""The group of entry points. Each names a function, which is called without arguments, or a module, which is
imported."""


class PluginError(ValueError):
    """Plugins could not be loaded. The message names them."""


def checked_name(name: str) -> str:
    """Returns ``name`` if the text of a policy can contain it (``turbo:index=mine,chunk=8``), else raises
    ValueError."""
    if not re.fullmatch(r"[\w.+-]+", name):
        raise ValueError(f"{name!r} is no valid name: only letters, digits and . + - _ are allowed")
    return name


_lock = threading.RLock()
_outcome: list[PluginError | None] = []
"""The result of loading: None for success, or the error; empty before loading."""


def load_plugins() -> None:
    """Loads all installed plugins, once per process.

    Raises:
        PluginError: some plugins could not be loaded; the others are. Later calls raise it again.
    """
    with _lock:
        if not _outcome:
            _outcome.append(None)  # a plugin that reads a policy itself does not start the loading again
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
