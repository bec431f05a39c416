"""A sandboxed Jinja with limits on templates' time and memory.

Jinja's sandbox keeps a template away from the program's objects, and limits the length of ``range``. This module also
counts and times loops and calls. Operators, filters, string methods and output are checked before they compute a large
value. The limits stop mistakes and known attacks; they do not replace a process with resource limits.
"""

from __future__ import annotations

import functools
import heapq
import math
import re
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Sequence, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

from jinja2 import Environment, TemplateRuntimeError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARACTERS = 1 << 24
"""Limit for the characters of a prompt and of any intermediate text. It is several times the number of tokens of the
longest context."""

MAX_ITEMS = 1 << 20
"""Limit for the items of a created list."""

MAX_STEPS, MAX_SECONDS = 1 << 20, 2.0
"""Limits for one rendering: for the number of loop iterations and calls, and for CPU seconds of its thread. CPU seconds
do not depend on how busy the machine is."""

MAX_WORK = 1 << 28
"""Limit for the product of two arguments' sizes. Filters and methods can write one argument for every character of
another."""

MAX_BITS = 1 << 12
"""Limit for the bits of integers."""

_SHORT = (int, float, complex, range, Undefined)
"""Types with a short text form; integers are limited separately."""

_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(?:\d{5}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(?:\{|\d{5})")
_READING = frozenset(
    [
        "attr",
        "batch",
        "count",
        "d",
        "default",
        "dictsort",
        "first",
        "groupby",
        "items",
        "last",
        "length",
        "list",
        "map",
        "max",
        "min",
        "random",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
        "slice",
        "sort",
        "sum",
        "unique",
    ]
)
"""Filters that do not turn a list into text: they only read its items or return them. Other filters can turn a whole
list into text."""


class _Budget:
    """The steps and the time that one rendering may take."""

    def __init__(self) -> None:
        self._steps, self._end = 0, time.thread_time() + MAX_SECONDS

    def step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS or time.thread_time() > self._end:
            raise TemplateRuntimeError(f"it took more than {MAX_STEPS} steps or {MAX_SECONDS:.0f} seconds")


_budget: ContextVar[_Budget] = ContextVar("budget")


@contextmanager
def bounded() -> Iterator[None]:
    """A context in which templates of ``BoundedEnvironment`` can be rendered."""
    token = _budget.set(_Budget())
    try:
        yield
    finally:
        _budget.reset(token)


def _too_large() -> TemplateRuntimeError:
    return TemplateRuntimeError(f"it makes values of more than {MAX_CHARACTERS} characters or {MAX_ITEMS} items")


def _weight(value: Any) -> int:
    """Length of a value's text form, in characters.

    Raises TemplateRuntimeError if the text is too long. Raises it also for types, such as namespaces and views, whose
    text contains other values that this function cannot measure.
    """
    weight = items = 0
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, str):
            weight += len(part)
        elif isinstance(part, dict):
            pending += [*part.keys(), *part.values()]
        elif isinstance(part, (list, tuple)):
            pending += part
        elif not (part is None or isinstance(part, _SHORT)):
            raise TemplateRuntimeError(f"it writes a {type(part).__name__} as text")
        items += 1
        if items > MAX_ITEMS or weight > MAX_CHARACTERS or len(pending) > MAX_ITEMS:
            raise _too_large()
    return weight + items


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    budget = _budget.get()
    for item in items:
        budget.step()
        yield item


def _listed(value: Any) -> Any:
    """Lists the items of an object that can only be measured by iterating. Other values are returned as they are."""
    return [*_counted(value)] if isinstance(value, (Iterator, KeysView, ValuesView, ItemsView)) else value


def _size(value: Any) -> int:
    if isinstance(value, int):
        return abs(value)
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict, range)) else 1


def _check_work(sizes: Iterable[int]) -> None:
    if math.prod(heapq.nlargest(2, sizes)) > MAX_WORK:
        raise _too_large()


def _check_format(form: str, arguments: Any, wide: re.Pattern[str]) -> None:
    if wide.search(form):
        raise TemplateRuntimeError("it formats values with a width that has five digits or is computed")
    _check_work([len(form), _weight(arguments)])


def _joined(parts: Iterable[str]) -> str:
    kept, length = [], 0
    for part in parts:
        length += len(part)
        if length > MAX_CHARACTERS:
            raise _too_large()
        kept.append(part)
    return "".join(kept)


def _bounded_text(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        raise _too_large()
    return value


def as_text(value: Any) -> str:
    """The text that a template's ``{{ value }}`` writes; raises TemplateRuntimeError beyond a limit."""
    _weight(value)
    return str(value)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a filter so that its arguments are checked. Jinja still passes the extra arguments that the filter
    needs."""

    @functools.wraps(function)
    def checked(*arguments: Any, **options: Any) -> Any:
        _budget.get().step()
        if name not in _READING:
            arguments = tuple(map(_listed, arguments))
        value, *others = [one for one in arguments if not isinstance(one, (Context, EvalContext, Environment))]
        if name not in ("default", "d"):  # errors of other filters can quote the arguments
            _weight([others, options])
        size = 1 if isinstance(value, int) else _size(value) if name in _READING else max(_size(value), _weight(value))
        if name == "format" and isinstance(value, str):
            _check_format(value, [*others, options], _WIDE_PERCENT)
        else:
            _check_work([size, *map(_size, others), *map(_size, options.values())])
        return _bounded_text(function(*arguments, **options))

    return checked


class _Code(CodeGenerator):
    """Compiles loops so that their iterations are counted, and ``~`` so that its result is limited."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.iter = _call("turns", [node.iter])
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.visit(_call("written", node.nodes), frame)


def _call(name: str, arguments: Sequence[nodes.Node]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), cast(list[nodes.Expr], [*arguments]), [], None, None)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates, which are rendered within ``bounded()``. Rendering raises TemplateRuntimeError beyond a
    limit."""

    code_generator_class = _Code
    concat = staticmethod(_joined)
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        # With ``optimized=True``, constant expressions would be computed during compilation, without limits.
        super().__init__(optimized=False, finalize=as_text, **options)
        del self.globals["lipsum"]
        for name, function in list(self.filters.items()):
            self.add_filter(name, function)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Adds a filter, with limits."""
        self.filters[name] = _bounded_filter(name, function)

    def turns(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """Iterates over the items, and counts each as a step."""
        return _counted(iterable)

    def written(self, *values: Any) -> str:
        """The values as one text."""
        return _joined(map(as_text, values))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Jinja, but counts all calls and limits methods of texts and numbers."""
        _budget.get().step()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str) and method.__name__ in ("format", "format_map"):
            _check_format(owner, [args, kwargs], _WIDE_BRACES)
        elif isinstance(owner, (str, bytes, int)):
            args = tuple(map(_listed, args))
            sizes = [max(_size(one), _weight(one)) for one in (*args, *kwargs.values())]
            _check_work([1 if isinstance(owner, int) else len(owner), *sizes])
        elif isinstance(owner, (list, tuple, dict)):  # errors of their methods quote the argument
            _weight([args, kwargs])
        return _bounded_text(super().call(__context, __obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """As in Jinja; limits the argument, since the error for a missing item quotes it."""
        _weight([argument.start, argument.stop, argument.step] if isinstance(argument, slice) else argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """As in Jinja, if the result is within limits."""
        if operator == "%" and isinstance(left, str):
            _check_format(left, right, _WIDE_PERCENT)
        elif operator in "+*" and not (isinstance(left, (int, float)) and isinstance(right, (int, float))):
            sizes = _size(left), _size(right)
            size = sum(sizes) if operator == "+" else math.prod(sizes)
            if size > (MAX_CHARACTERS if isinstance(left, str) or isinstance(right, str) else MAX_ITEMS):
                raise _too_large()
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise _too_large()
        return super().call_binop(context, operator, left, right)
