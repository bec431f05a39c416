"""Settings that a dataclass declares in one place each: its default, what it may be, its flag and the flag's help.

``EngineConfig`` declares a server's settings of the engine this way; its flags, its checks and those flags of
``shadowkv plan`` that mean the same follow from the declarations.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_DECLARED = "setting"


class Check(NamedTuple):
    """What a value must be.

    Attributes:
        holds: whether a value is that.
        words: completes "must be", "must not be", … in an error.
    """

    holds: Callable[[Any], bool]
    words: str


def at_least(least: int) -> Check:
    """A number of at least ``least``."""
    return Check(lambda value: value >= least, f"must be at least {least}")


def finite(least: float, *, above: bool = False) -> Check:
    """A finite number of at least ``least``, or above it."""
    words = f"must be a finite number {'above' if above else 'of at least'} {least:g}"
    return Check(lambda value: (value > least if above else value >= least) and value < math.inf, words)


SHARE = Check(lambda value: 0 < value <= 1, "must be in (0, 1]")
POSITIVE = Check(lambda value: value > 0, "must be positive")
NOT_NEGATIVE = Check(lambda value: value >= 0, "must not be negative")
NOT_EMPTY = Check(lambda value: value != "", "must not be empty")


class OtherFlag(NamedTuple):
    """Another flag that sets the same field, by other values; one of the two can be given."""

    name: str
    parse: Callable[[str], Any]
    metavar: str
    help: str


@dataclass(frozen=True)
class Setting:
    """What a field declares.

    Attributes:
        group: title of its flag's group in the help.
        help: of its flag; ``%(default)s`` stands for the default.
        aliases: other names of the flag.
        parse: makes a value of the flag's text; None: the field's type.
        metavar: what stands for the flag's value in the help.
        choices: all values that there are, besides None where that is the default.
        check: what the value must be, where it is not None.
        other: another flag of the field.
    """

    group: str
    help: str
    aliases: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    check: Check | None = None
    other: OtherFlag | None = None


def setting(default: Any, group: str, help: str, *aliases: str, **declared: Any) -> Any:
    """A field of a dataclass with a default and a ``Setting``, whose further attributes are ``declared``."""
    return field(default=default, metadata={_DECLARED: Setting(group, help, aliases, **declared)})


def settings_of(config: type[DataclassInstance]) -> Mapping[str, Setting]:
    """What every field of a dataclass declares."""
    return {one.name: one.metadata[_DECLARED] for one in fields(config)}


def violations(values: DataclassInstance) -> list[str]:
    """A reason for each field whose value is not what it declares: ``max_num_seqs=0 must be at least 1``."""
    reasons = []
    for one in fields(values):
        declared: Setting = one.metadata[_DECLARED]
        value = getattr(values, one.name)
        if value is None:
            continue
        if declared.choices is not None and value not in declared.choices:
            reasons.append(f"{one.name}={value!r} is not one of {', '.join(declared.choices)}")
        if declared.check is not None and not declared.check.holds(value):
            reasons.append(f"{one.name}={value!r} {declared.check.words}")
    return reasons


def add_flags(parser: argparse.ArgumentParser, config: type[DataclassInstance]) -> None:
    """Adds a flag for every field of ``config``, in the groups that they name."""
    groups: dict[str, Any] = {}
    for name, declared in settings_of(config).items():
        if declared.group not in groups:
            groups[declared.group] = parser.add_argument_group(declared.group)
        add_flag(groups[declared.group], config, name)


def add_flag(group: Any, config: type[DataclassInstance], name: str, *aliases: str, **changed: Any) -> None:
    """Adds the flag of a field to a parser or a group of one.

    Args:
        aliases: further names of the flag.
        changed: arguments of ``add_argument`` that are others here, its default or help for example.
    """
    declared = settings_of(config)[name]
    options: dict[str, Any] = {"dest": name, "default": _default(config, name), "help": declared.help}
    kind = _kind(config, name)
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction if options["default"] else "store_true"
    else:
        options["choices"] = None if declared.parse else declared.choices
        options["type"] = declared.parse or kind
        options["metavar"] = declared.metavar
    if declared.other is not None:
        group = group.add_mutually_exclusive_group()
    flag = f"--{name.replace('_', '-')}"
    group.add_argument(flag, *declared.aliases, *aliases, **options | changed)
    if declared.other is not None:
        other, parse, metavar, text = declared.other
        group.add_argument(other, dest=name, default=argparse.SUPPRESS, type=parse, metavar=metavar, help=text)


def _default(config: type[DataclassInstance], name: str) -> Any:
    (default,) = (one.default for one in fields(config) if one.name == name)
    assert default is not MISSING, f"{name} has no default"
    return default


def _kind(config: type[DataclassInstance], name: str) -> type:
    """The type of a field's values that are not None, the first where there are several."""
    hint = _hints(config)[name]
    kinds: Sequence[Any] = get_args(hint) or (hint,)
    return next((kind for kind in kinds if kind in (bool, int, float)), str)


@cache
def _hints(config: type[DataclassInstance]) -> dict[str, Any]:
    return get_type_hints(config)
