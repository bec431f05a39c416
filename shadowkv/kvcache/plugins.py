"""Plugins: installed packages that register their own parts, codecs, presets and backends of ops.

Entry points name plugins:

    [project.entry-points."shadowkv.plugins"]
    mine = "my_package.policies:register"

Plugins are loaded in each process that loads an engine, and in each process that reads a policy with a name that
shadowkv does not know.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Container, Iterable
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

GROUP = "shadowkv.plugins"
"""The group of entry points. Each entry point names a function, which is called without arguments, or a module, which
is imported."""

OWN = EntryPoint("baselines", "shadowkv.baselines:register", GROUP)
"""The package's own plugin. It is named here so that it is found even if the package is not installed."""


class PluginError(ValueError):
    """Plugins could not be loaded. The message names them."""


def checked_name(name: str) -> str:
    """Returns ``name`` if the text of a policy can contain it (``turbo:index=mine,chunk=8``), else raises
    ValueError."""
    if not re.fullmatch(r"[\w.+-]+", name):
        raise ValueError(f"{name!r} is no valid name: only letters, digits and . + - _ are allowed")
    return name


_lock = threading.RLock()
_outcomes: dict[bool, PluginError | None] = {}
"""The results of loading the package's own plugin (False) and installed ones (True): None for success, or the error."""


def has(names: Container[str], name: str) -> bool:
    """Whether ``names`` contains ``name``. If it does not, plugins are loaded that may register it: first the package's
    own one, then installed ones, each once per process.

    Raises:
        PluginError: ``name`` is unknown, and some plugins could not be loaded. The other plugins stay loaded.
    """
    for installed in (False, True):
        if name in names:
            return True
        error = _load_once(installed)
    if name not in names and error is not None:
        raise PluginError(str(error)) from error
    return name in names


def load_own() -> None:
    """Loads the package's own plugin, once per process. Errors that list known names call it, so that they list the
    names that the plugin registers."""
    _load_once(False)


def load_installed() -> PluginError | None:
    """Loads installed plugins, once per process, and returns an error that names those that could not be loaded; None
    if all were loaded."""
    return _load_once(True)


def _load_once(installed: bool) -> PluginError | None:
    with _lock:
        if installed not in _outcomes:
            _outcomes[installed] = None  # set first, so that a plugin that reads a policy does not load plugins again
            _outcomes[installed] = _load_all(entry_points(group=GROUP) if installed else [OWN])
        return _outcomes[installed]


def _load_all(found: Iterable[EntryPoint]) -> PluginError | None:
    error, reasons = None, []
    for plugin in sorted(set(found), key=lambda plugin: (plugin.name, plugin.value)):
        try:
            _load(plugin)
        except Exception as failure:
            reasons.append(
                f"plugin {plugin.name!r} ({plugin.value}) cannot be loaded: {type(failure).__name__}: {failure}"
            )
            error = PluginError("; ".join(reasons))
            error.__cause__ = failure
    return error


def _load(plugin: EntryPoint) -> None:
    target = plugin.load()
    if callable(target):
        target()
    elif not isinstance(target, ModuleType):
        raise TypeError("it is neither a function nor a module")
