"""``policies_text``: the text of ``--kv help``, which lists what presets, fields and parts declare.

The function has its own module because it imports all parts, and with them PyTorch, which ``--help`` does not need.
"""

from __future__ import annotations

from collections.abc import Iterator
from shutil import get_terminal_size
from textwrap import wrap
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from shadowkv.kvcache.parts import AXES, parts_by_setting
from shadowkv.kvcache.plugins import load_installed, load_own
from shadowkv.kvcache.policy.spec import PARTS, KVSpec
from shadowkv.kvcache.presets import PRESETS
from shadowkv.settings import settings_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

METAVARS = {bool: "true|false", float: "NUMBER", int: "INTEGER"}
"""Placeholders of values in the text, by type. If a value can have several of these types, it has the placeholder of
the first one. If it can have none of them, it has the placeholder NAME."""


def policies_text() -> str:
    """Lists presets, and the fields and settings of parts that can be changed, with types, defaults and help. Loads all
    plugins. If plugins could not be loaded, a last line names them."""
    load_own()
    error = load_installed()
    column = max(map(len, PRESETS))
    lines = [
        "A policy is a preset, or a preset with fields and settings changed:",
        "turbo:chunk=8,values=dense,rank=160",
        "\npresets:",
        *(f"  {name:{column}}  {_changes(spec)}" for name, spec in PRESETS.items()),
        "\nfields:",
        *_fields(),
        "\nsettings of parts:",
        *_settings(),
    ]
    if error is not None:
        lines.append(f"\nnote: {error}")
    return "\n".join(lines)


def _changes(spec: KVSpec) -> str:
    """Returns the fields in which ``spec`` differs from a policy that keeps everything exact, in the syntax of
    ``--kv``."""
    exact = KVSpec().as_dict()
    changed = (f"{name}={_text(value)}" for name, value in spec.as_dict().items() if exact.get(name, ...) != value)
    return ",".join(changed) or "every key and value exact on the device"


def _fields() -> Iterator[str]:
    for name, declared in settings_of(KVSpec).items():
        yield from _row(KVSpec, name, *([f"names: {', '.join(AXES[name])}"] if declared.group == PARTS else []))


def _settings() -> Iterator[str]:
    for (axis, name, owner), parts in parts_by_setting().items():
        yield from _row(owner, name, f"{axis}: {', '.join(parts)}")


def _row(owner: type[DataclassInstance], name: str, *further: str) -> Iterator[str]:
    yield f"  {name}={_metavar(owner, name)}"
    width = get_terminal_size().columns - 2  # as in argparse
    for text in (_help(owner, name), *further):
        yield from wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _metavar(owner: type[DataclassInstance], name: str) -> str:
    hint = get_type_hints(owner)[name]
    return next((text for kind, text in METAVARS.items() if kind in (get_args(hint) or (hint,))), "NAME")


def _help(owner: type[DataclassInstance], name: str) -> str:
    default, text = getattr(owner, name), settings_of(owner)[name].help
    return text if default is None or "(default" in text else f"{text} (default: {_text(default)})"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
