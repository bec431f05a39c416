"""Parsers of tool calls whose arguments are plain text between tags. The function's schema tells the types of the
arguments, with which they are converted to JSON."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

from shadowkv.serve.text.argument_values import ANYTHING, STRING, ValueWriter, argument_types, properties
from shadowkv.serve.text.text_reader import Reading
from shadowkv.serve.text.tool_parser import ToolParser

NOT_IN_NAMES = " \t\r\n<>"

END = ""
"""Stands for the end of the answer in ``TaggedCalls.value_ends``."""


class TaggedCalls(ToolParser):
    """Base of the parsers of tagged calls.

    A value may itself contain tags. A tag ends a value only if the text after it continues or ends the call. Strings
    are emitted as they arrive, other values when they are complete. If the answer ends inside such a value, the value
    is left out.

    Attributes:
        outer: tags around calls.
        begins: marks that can begin a call.
        value_ends: maps each tag that can end a value to the tags of which one must follow (after optional white
            space).
        untyped: types that arguments may have if their schema names no type.
    """

    outer: ClassVar[tuple[str, str]] = ("<tool_call>", "</tool_call>")
    begins: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    value_ends: ClassVar[dict[str, tuple[str, ...]]]
    untyped: ClassVar[frozenset[str]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._end = re.compile("|".join(map(re.escape, cls.value_ends)))

    _end: ClassVar[re.Pattern[str]]

    def _read(self) -> Reading[None]:
        while (yield from self._until(*self.begins)):
            yield from self._passed(self.outer[0])
            if not (yield from self._function()):
                self._say()
                continue
            yield from self._passed(self.outer[1])
            self._drop()

    @abstractmethod
    def _function(self) -> Reading[bool]:
        """Reads a call between its outer tags. Returns False if the text is not a call."""

    def _begin_call(self, name: str) -> None:
        self._open(name)
        self._name, self._given = name, list[str]()
        self._write("{")

    @property
    def _parameters(self) -> object:
        """The JSON schema of the called function's arguments."""
        return self._functions.get(self._name, {}).get("parameters")

    def _argument(self, key: str) -> Reading[None]:
        """Reads the value of an argument up to the tag that ends it, and emits the key and the value."""
        writer = ValueWriter(argument_types(self._parameters, key) or self.untyped)
        self._write(f"{', ' if self._given else ''}{_quoted(key)}: ")
        self._given.append(key)
        if (yield from self._to_value_end(lambda text: self._write(writer.add(text)))):
            self._write(writer.end())

    def _to_value_end(self, emit: Callable[[str], None]) -> Reading[bool]:
        """Passes a value on to ``emit``, up to the tag that ends the value. Returns False if the answer ends first."""
        self._drop()
        while True:
            tag = self._end.search(self._text, self._at)
            self._at = len(self._text) - self._overlap(*self.value_ends) if tag is None else tag.start()
            emit(self._text[self._begin : self._at])
            self._drop()
            if tag is None and not self._ended:
                yield
                continue
            is_end = None if tag is None else (yield from self._is_value_end(tag.group()))
            if tag is None or is_end is None:  # the rest is left out, as it may be the beginning of an end tag
                self._at = len(self._text)
                self._drop()
                return False
            self._at = self._begin + (0 if is_end else len(tag.group()))
            if is_end:
                return True

    def _is_value_end(self, tag: str) -> Reading[bool | None]:
        """Returns whether ``tag``, which comes next in the text, ends a value; None if the answer ends before that is
        known. Reads past the tag to find out."""
        self._at += len(tag)
        yield from self._blanks()
        followers = self.value_ends[tag]
        for follower in followers:
            if follower != END and (yield from self._sees(follower)):
                return True
        rest = self._text[self._at :]
        if self._ended and any(follower.startswith(rest) for follower in followers):
            return True if rest in followers else None
        return False


class Qwen3Coder(TaggedCalls):
    """``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``, with each tag and value on
    its own line. As in vLLM the outer tags may be missing. The tag that ends a value may be missing, too. The value
    then ends at the function's end tag, or at the tag of another parameter. That must be a parameter of the function,
    and must not have a value yet."""

    _TAGS: ClassVar = {"</parameter>": ("<parameter=", "</function>", "</tool_call>"), "</function>": ("</tool_call>",)}
    value_ends: ClassVar = {
        **{f"\n{tag}": followers for tag, followers in _TAGS.items()},
        **_TAGS,
        "\n</tool_call>": ("<tool_call>", END),
        "\n<parameter=": (),
    }
    begins: ClassVar = ("<tool_call>", "<function=")
    untyped: ClassVar = STRING

    def _function(self) -> Reading[bool]:
        if not (yield from self._passed("<function=")):
            return False
        name = yield from self._up_to(NOT_IN_NAMES)
        if not name or not (yield from self._passed(">")):
            return False
        if not (yield from self._sees("<parameter=")) and not (yield from self._sees("</function>")):
            return False
        self._begin_call(name)
        while (yield from self._passed("<parameter=")):
            yield from self._parameter()
            yield from self._blanks()
            yield from self._passed("</parameter>")
        if (yield from self._sees("</function>")) or (yield from self._sees("</tool_call>")):
            self._write("}")
        yield from self._passed("</function>")
        self._drop()
        return True

    def _parameter(self) -> Reading[None]:
        key = yield from self._up_to(NOT_IN_NAMES)
        if not key or not (yield from self._sees(">")):
            yield from self._to_value_end(lambda text: None)  # an incomplete tag: left out, as in vLLM
            return
        self._at += 1
        if (yield from self._next()) == "\n":
            self._at += 1
        yield from self._argument(key)

    def _is_value_end(self, tag: str) -> Reading[bool | None]:
        if not tag.endswith("="):
            return (yield from super()._is_value_end(tag))
        self._at += len(tag)
        key = yield from self._up_to(NOT_IN_NAMES)
        if self._ended and self._at == len(self._text):
            return None
        is_tag = yield from self._sees(">")
        return is_tag and key not in self._given and key in properties(self._parameters)


class Glm45(TaggedCalls):
    """``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``. GLM-4.5 and 4.6 have line ends
    between the tags, GLM-4.7 has none. An incomplete pair of key and value is left out, as in vLLM."""

    value_ends: ClassVar = {"</arg_value>": ("<arg_key>", "</tool_call>")}
    untyped: ClassVar = ANYTHING

    def _function(self) -> Reading[bool]:
        name = yield from self._up_to(NOT_IN_NAMES)
        yield from self._blanks()
        if not name or not ((yield from self._sees("<arg_key>")) or (yield from self._sees("</tool_call>"))):
            return False
        self._begin_call(name)
        while (yield from self._passed("<arg_key>")):
            key = (yield from self._up_to("<")).strip()
            if (yield from self._passed("</arg_key>")) and (yield from self._sees("<arg_value>")):
                self._at += len("<arg_value>")
                yield from self._argument(key)
            else:
                yield from self._to_value_end(lambda text: None)
            yield from self._passed("</arg_value>")
        if (yield from self._sees("</tool_call>")):
            self._write("}")
        return True


class MinimaxM2(TaggedCalls):
    """``<minimax:tool_call><invoke name="name"><parameter name="key">value</parameter></invoke></minimax:tool_call>``,
    with line ends between the tags. The outer tags can hold several calls."""

    outer: ClassVar = ("<minimax:tool_call>", "</minimax:tool_call>")
    begins: ClassVar = (outer[0], '<invoke name="')
    value_ends: ClassVar = {"</parameter>": ('<parameter name="', "</invoke>")}
    untyped: ClassVar = STRING

    def _function(self) -> Reading[bool]:
        name = yield from self._named("invoke")
        yield from self._blanks()
        if not name or not ((yield from self._sees("<parameter name=")) or (yield from self._sees("</invoke>"))):
            return False
        self._begin_call(name)
        while (yield from self._sees("<parameter name=")):
            if key := (yield from self._named("parameter")):
                yield from self._argument(key)
            else:
                yield from self._to_value_end(lambda text: None)  # an incomplete tag: left out
            yield from self._passed("</parameter>")
        if (yield from self._sees("</invoke>")):
            self._write("}")
        yield from self._passed("</invoke>")
        self._drop()
        return True

    def _named(self, tag: str) -> Reading[str]:
        """Reads a tag with a name, up to its end. Returns the name; empty if the next tag is another one."""
        if not (yield from self._passed(f"<{tag} name=")):
            return ""
        name = yield from self._up_to("\n<>")
        if not (yield from self._sees(">")):
            return ""
        self._at += 1
        return name.strip().strip("\"'")


def _quoted(key: str) -> str:
    return ValueWriter(STRING).add(key) + '"'
