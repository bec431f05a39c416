"""``Parser``: the argument parser of all commands. It reports a mistake in one line, and reads flags from YAML
files."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from shadowkv.wording import NamesSettings

ALIKE = 0.75
"""A known flag is suggested in place of an unknown one if their similarity (``difflib``) is at least this."""

SHORT_BYTES = 2**17
"""Maximum size in bytes of a file of flags. YAML of this size is parsed in a second or two."""

UNKNOWN = re.compile(r"unrecognized arguments: (--[\w-]+)")

INVALID = re.compile(r"invalid (int|float) value: (.*)", re.DOTALL)

KINDS = {"int": "whole number", "float": "number"}
"""What the error for a flag of this type asks for."""

ENTRY = re.compile(r"(--?[a-zA-Z][\w-]*)\.([\w-]+(?:\.[\w-]+)*)(\+?)(?:=(.*))?", re.DOTALL)
"""Matches an argument in vLLM's dotted form: ``--hf-overrides.rope_scaling.factor=4``. It sets one entry of the flag's
JSON object. A ``+`` after the name appends the value to a list."""


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line, without the list of flags. As in vLLM, flags can have
    underscores instead of dashes."""

    def error(self, message: str) -> NoReturn:
        if (unknown := UNKNOWN.match(message)) and (near := self._near(unknown[1])):
            message += f": did you mean {near}?"
        message = INVALID.sub(lambda found: f"{found[2]} is no {KINDS[found[1]]}", message)
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")

    def format_help(self) -> str:
        """Formats the help. Descriptions come from docstrings, whose double backquotes become plain quotes."""
        return super().format_help().replace("``", "'")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args(self._joined([_dashed(argument) for argument in given]), namespace)

    def parse_with_file(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Parses a command line and the YAML file of ``--config``, if there is one. As in vLLM, the file's keys are
        names of flags, and the command line overrides the file."""
        unset: list[Any] = []  # marks flags that are not given; a list, because flags with several values extend it
        before = argparse.Namespace(**{action.dest: unset for action in self._actions})
        given = {name: value for name, value in vars(self.parse_args(arguments, before)).items() if value is not unset}
        file = given.get("config")
        args = self.parse_args([] if file is None else list(self._flags_of(Path(file))))
        for name, value in given.items():
            setattr(args, name, value)
        return args

    def _near(self, flag: str) -> str | None:
        """Returns the most similar flag that --help lists, or None if none is similar. Hidden flags are not suggested,
        because they are ignored or refused."""
        listed = [name for name, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
        return next(iter(get_close_matches(flag, listed, 1, ALIKE)), None)

    def _joined(self, arguments: list[str]) -> list[str]:
        """Joins the arguments that set entries of a flag's JSON object (``ENTRY``) into one object, which becomes the
        flag's value. The other arguments stay as they are."""
        others: list[str] = []
        objects: dict[str, dict[str, Any]] = {}
        given = iter(arguments)
        for argument in given:
            found = ENTRY.fullmatch(argument)
            if found is None or getattr(self._option_string_actions.get(found[1]), "metavar", None) != "JSON":
                others.append(argument)
                continue
            value = next(given, None) if found[4] is None else found[4]
            if value is None:
                self.error(f"argument {argument}: expected one argument")
            try:
                _add_entry(objects.setdefault(found[1], {}), found[2].split("."), bool(found[3]), value)
            except (AttributeError, TypeError):  # an earlier argument gave the entry a value that cannot be extended
                self.error(f"argument {argument}: it conflicts with another argument for the same entry")
        for flag in objects:
            if any(argument.partition("=")[0] == flag for argument in others):
                self.error(f"argument {flag}: pass either the whole object or its entries ({flag}.NAME)")
        return [*(part for flag, entries in objects.items() for part in (flag, json.dumps(entries))), *others]

    def _flags_of(self, file: Path) -> Iterator[str]:
        import yaml  # imported here because few command lines need it

        class Loader(yaml.SafeLoader):
            """A YAML loader without aliases. A few lines of aliases could expand to more than the memory holds."""

            def compose_node(self, parent: Any, index: Any) -> Any:
                if self.check_event(yaml.AliasEvent):
                    wrong = "an alias (*name): write out what it stands for"
                    raise yaml.composer.ComposerError(None, None, wrong, self.peek_event().start_mark)
                return super().compose_node(parent, index)

        try:
            content = yaml.load(read_short(file), Loader)
        except RecursionError:
            self.error(f"--config {file}: it is nested too deeply")
        except (OSError, ValueError, yaml.YAMLError) as error:
            self.error(f"--config {file}: {one_line(error)}")
        if not isinstance(content, dict):
            self.error(f"--config {file} has no flags, as in 'max-model-len: 8192'")
        for key, value in content.items():
            flag = _dashed(f"--{key}")
            action = self._option_string_actions.get(flag)
            if action is None or flag == "--config":
                near = self._near(flag)
                self.error(f"--config {file}: there is no flag {key!r}{f': did you mean {near}?' if near else ''}")
            try:
                yield from _as_arguments(flag, action, value)
            except (TypeError, ValueError):  # raised for YAML's dates, bytes, sets and huge numbers
                self.error(f"--config {file}: {key!r} has a value that JSON does not have; put it in quotes")


def read_short(file: Path) -> str:
    """Reads a short file or pipe as text. Raises ValueError if it has more than ``SHORT_BYTES``, OSError if it cannot
    be read."""
    with file.open("rb") as opened:
        raw = opened.read(SHORT_BYTES + 1)
    if len(raw) > SHORT_BYTES:
        raise ValueError(f"it has more than {SHORT_BYTES >> 10} KiB, which is the limit")
    return raw.decode("utf-8")


def add_config_file(parser: argparse.ArgumentParser) -> None:
    """Adds ``--config``, for ``Parser.parse_with_file``."""
    text = "read flags from a YAML file ('max-model-len: 8192'); flags of the command line override it"
    parser.add_argument("--config", metavar="FILE", help=text)


def _dashed(argument: str) -> str:
    """Replaces underscores in a flag's name by dashes. The flag's value and the names of its entries stay unchanged."""
    if not argument.startswith("--"):
        return argument
    end = next((at for at, letter in enumerate(argument) if letter in ".="), len(argument))
    return argument[:end].replace("_", "-") + argument[end:]


def _add_entry(entries: dict[str, Any], path: list[str], is_listed: bool, text: str) -> None:
    """Sets the entry at ``path`` of an object. With ``is_listed``, the value is appended to the list at ``path``
    instead. The value is ``text`` parsed as JSON, or ``text`` itself if it is not JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    *outer, name = path
    for key in outer:
        entries = entries.setdefault(key, {})
    if is_listed:
        entries.setdefault(name, []).append(value)
    else:
        entries[name] = value


def _as_arguments(flag: str, action: argparse.Action, value: Any) -> list[str]:
    """Converts an entry of a YAML file to arguments. The list is empty for None, and for False if the flag has no
    ``--no-`` form."""
    if isinstance(value, bool) and action.nargs == 0:
        off = f"--no-{flag.removeprefix('--')}"
        return [flag] if value else [off] if off in action.option_strings else []
    if value is None:
        return []
    if isinstance(value, list) and action.nargs in ("+", "*"):
        return [flag, *map(_as_text, value)]
    return [f"{flag}={_as_text(value)}"]


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def one_line(error: BaseException, **renamed: str) -> str:
    """Returns an error's message as one line, in which semicolons separate the reasons that the message lists. If the
    message is empty, returns the name of the error's type.

    Names of settings in the message become names of flags. A setting's flag is its name with dashes, unless
    ``renamed`` has another flag for it.
    """
    text = error.as_flags(renamed) if isinstance(error, NamesSettings) else str(error)
    first, *reasons = [line.strip().removeprefix("- ") for line in text.splitlines() if line.strip()] or [
        type(error).__name__
    ]
    return f"{first} {'; '.join(reasons)}".rstrip()
