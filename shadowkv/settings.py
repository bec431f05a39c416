"""Declarations of settings: a dataclass field declares its default, check, flag and the flag's help in one place.

``EngineConfig``, ``ServerSettings`` and the settings of cache parts are declared this way. The flags of ``shadowkv
serve`` and their checks are made from the declarations. Flags of other commands are made from them, too, if they have
the same meaning.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_DECLARED = "setting"


class Check(NamedTuple):
    """A rule that a value must keep.

    Attributes:
        holds: function that returns whether a value keeps the rule.
        rule: text that error messages put after the value, such as ``must be at least 1``.
    """

    holds: Callable[[Any], bool]
    rule: str


def at_least(least: int) -> Check:
    """Returns the check that a number is at least ``least``."""
    return Check(lambda value: value >= least, f"must be at least {least}")


def finite(least: float, *, above: bool = False) -> Check:
    """Returns the check that a number is finite and at least ``least``. With ``above`` it must be greater than
    ``least``."""
    rule = f"must be a finite number {'above' if above else 'of at least'} {least:g}"
    return Check(lambda value: (value > least if above else value >= least) and value < math.inf, rule)


SHARE = Check(lambda value: 0 < value <= 1, "must be in (0, 1]")
POSITIVE = Check(lambda value: 0 < value < math.inf, "must be finite and positive")
NOT_NEGATIVE = Check(lambda value: 0 <= value < math.inf, "must be finite and not negative")
NOT_EMPTY = Check(lambda value: value != "", "must not be empty")


class OtherFlag(NamedTuple):
    """A second flag that sets the same field with other values. Only one of the two flags can be used."""

    name: str
    parse: Callable[[str], Any]
    metavar: str
    help: str


@dataclass(frozen=True)
class Setting:
    """The declaration of a field.

    Attributes:
        group: title of the flag's group in ``--help``.
        help: help of the flag. ``--help`` adds the default, unless the text has ``(default: ...)`` itself.
        aliases: other names of the flag.
        parse: function that converts the flag's text to a value. For a tuple field, it converts each text to a tuple of
            values. If None, the field's type converts the text.
        metavar: the placeholder of the flag's value in ``--help``.
        choices: all valid values. None is valid too if it is the default.
        check: a rule for values other than None.
        other: a second flag that sets the field.
    """

    group: str
    help: str
    aliases: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    metavar: str | None = None
    choices: tuple[Any, ...] | None = None
    check: Check | None = None
    other: OtherFlag | None = None


def setting(default: Any, group: str, help: str, *aliases: str, **declared: Any) -> Any:
    """Declares a dataclass field with a default and a ``Setting``. ``declared`` are the other attributes of the
    ``Setting``."""
    return field(default=default, metadata={_DECLARED: Setting(group, help, aliases, **declared)})


def settings_of(config: type[DataclassInstance]) -> Mapping[str, Setting]:
    """Returns the declaration of each declared field of a dataclass, by name."""
    return {one.name: one.metadata[_DECLARED] for one in fields(config) if _DECLARED in one.metadata}


def violation(config: type[DataclassInstance], name: str, value: Any) -> str | None:
    """Returns the reason why ``value`` violates the declaration of the field ``name``, such as ``max_num_seqs=0 must be
    at least 1``. Returns None if the value is valid."""
    declared = settings_of(config)[name]
    if value is None:
        return None
    if declared.choices is not None and value not in declared.choices:
        return f"{name}={value!r} is not one of {', '.join(map(str, declared.choices))}"
    if declared.check is not None and not declared.check.holds(value):
        return f"{name}={value!r} {declared.check.rule}"
    return None


def violations(values: DataclassInstance) -> list[str]:
    """Returns a reason for each field whose value violates its declaration."""
    config = type(values)
    reasons = (violation(config, name, getattr(values, name)) for name in settings_of(config))
    return [reason for reason in reasons if reason is not None]


def values_of(config: type[DataclassInstance], args: argparse.Namespace) -> dict[str, Any]:
    """Returns the values that parsed flags give to the fields of ``config``, by name."""
    return {one.name: getattr(args, one.name) for one in fields(config)}


def add_flags(parser: argparse.ArgumentParser, config: type[DataclassInstance]) -> None:
    """Adds a flag for every field of ``config``, in the declared groups."""
    groups: dict[str, Any] = {}
    for name, declared in settings_of(config).items():
        if declared.group not in groups:
            groups[declared.group] = parser.add_argument_group(declared.group)
        add_flag(groups[declared.group], config, name)


def add_flag(group: Any, config: type[DataclassInstance], name: str, *aliases: str, **changed: Any) -> None:
    """Adds the flag of a field to a parser or to a group of a parser.

    A bool becomes a switch, with a ``--no-`` form unless the default is False. A tuple becomes a flag with one or more
    values, which can be repeated.

    Args:
        aliases: other names of the flag.
        changed: arguments of ``add_argument`` that replace those from the declaration, such as the default or the help.
    """
    declared = settings_of(config)[name]
    options: dict[str, Any] = {"dest": name, "default": _default(config, name), "help": declared.help}
    kind = _kind(config, name)
    if kind is bool:
        options["action"] = "store_true" if options["default"] is False else argparse.BooleanOptionalAction
    else:
        options["choices"] = None if declared.parse else declared.choices
        options["type"] = declared.parse or (_number(declared.check) if kind is float else kind)
        options["metavar"] = declared.metavar
    if kind is tuple:
        options |= {"type": declared.parse or (lambda text: (text,)), "nargs": "+", "action": _Extend}
    options |= changed
    options["help"] = _with_default(options["help"], options["default"])
    if declared.other is not None:
        group = group.add_mutually_exclusive_group()
    flag = f"--{name.replace('_', '-')}"
    group.add_argument(flag, *declared.aliases, *aliases, **options)
    if declared.other is not None:
        other, parse, metavar, text = declared.other
        group.add_argument(other, dest=name, default=argparse.SUPPRESS, type=parse, metavar=metavar, help=text)


def _number(check: Check | None) -> Callable[[str], float]:
    """Returns a function that parses a flag's number. Its error says what ``check`` asks for."""

    def parse(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} {check.rule if check else 'must be a number'}") from None

    return parse


class _Extend(argparse.Action):
    """Collects the values of all occurrences of a flag in one tuple, in the order of the command line. The tuple
    replaces the default."""

    def __call__(self, parser: Any, namespace: Any, values: Any, flag: str | None = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, (*(() if before is self.default else before), *chain.from_iterable(values)))


def _with_default(help: str, default: Any) -> str:
    if "(default" in help or default is None or default is False or default == ():
        return help
    return f"{help} (default: %(default){'g' if isinstance(default, float) else 's'})"


def _default(config: type[DataclassInstance], name: str) -> Any:
    (default,) = (one.default for one in fields(config) if one.name == name)
    assert default is not MISSING, f"{name} has no default"
    return default


def _kind(config: type[DataclassInstance], name: str) -> type:
    """Returns the type that a flag's text is converted to. For a tuple field it is tuple. For other fields it is the
    first of the field's types that is bool, int or float. If none of them is, it is str."""
    hint = _hints(config)[name]
    if get_origin(hint) is tuple:
        return tuple
    kinds: Sequence[Any] = get_args(hint) or (hint,)
    return next((kind for kind in kinds if kind in (bool, int, float)), str)


@cache
def _hints(config: type[DataclassInstance]) -> dict[str, Any]:
    return get_type_hints(config)
