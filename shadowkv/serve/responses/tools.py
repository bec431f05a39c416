"""``tools`` and ``tool_choice`` of ``/v1/responses``. Tools are functions, some of them in namespaces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema

from shadowkv.serve.bodies.body import Body, Text, at_most, wrong
from shadowkv.serve.bodies.limits import MAX_NAME_CHARS, MAX_TOOLS
from shadowkv.serve.openai.tools import WORDS, Function, FunctionName, within_limits
from shadowkv.serve.openai.unions import ByType

SEPARATOR = "__"
"""Separates namespace and name in a function's full name, which the model sees. vLLM uses this separator, too."""


class FunctionTool(Function):
    """A function that the model can call."""

    type: Literal["function"]

    @property
    def repeated(self) -> dict[str, Any]:
        """The tool in the form in which responses echo it."""
        return {"strict": None, "description": None, **self.model_dump(exclude_none=True)}


class NamespaceTool(Body):
    """Functions in one namespace, such as those of one MCP server."""

    type: Literal["namespace"]
    name: FunctionName
    description: Text | None = None
    tools: Annotated[list[FunctionTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]

    @property
    def repeated(self) -> dict[str, Any]:
        """The tool in the form in which responses echo it."""
        about = {"type": self.type, "name": self.name, "description": self.description}
        return {**about, "tools": [tool.repeated for tool in self.tools]}


Tool = Annotated[FunctionTool | NamespaceTool, ByType("built-in tools")]


def full_name(namespace: str | None, name: str) -> str:
    """Returns a function's full name, which the model sees."""
    return name if namespace is None else f"{namespace}{SEPARATOR}{name}"


def functions_of(tools: Iterable[Tool]) -> dict[str, tuple[FunctionTool, str | None]]:
    """Maps the full name of each function to the function and its namespace. Raises PydanticCustomError if two full
    names are equal."""
    functions: dict[str, tuple[FunctionTool, str | None]] = {}
    for tool in tools:
        namespace = tool.name if isinstance(tool, NamespaceTool) else None
        for function in tool.tools if isinstance(tool, NamespaceTool) else [tool]:
            name = full_name(namespace, function.name)
            if name in functions:
                raise wrong(f"there are two functions with the name {name!r}; names must differ")
            functions[name] = function, namespace
    at_most(MAX_TOOLS, "functions", len(functions))
    return functions


def _different(tools: list[Tool]) -> list[Tool]:
    functions_of(tools)
    return tools


Tools = Annotated[
    list[Tool],
    Field(max_length=MAX_TOOLS, fail_fast=True),
    BeforeValidator(within_limits),
    AfterValidator(_different),
]


def _choice(value: Any) -> str | dict[str, str]:
    if value in WORDS:
        return str(value)
    name = value.get("name") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(name, str):
        raise wrong("must be 'none', 'auto', 'required' or {'type': 'function', 'name': …}")
    at_most(MAX_NAME_CHARS, "characters of a name", len(name))
    return {"type": "function", "name": name}


TOOL_CHOICE = {
    "anyOf": [
        {"enum": [*WORDS]},
        {
            "type": "object",
            "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
            "required": ["type", "name"],
        },
    ]
}
ToolChoice = Annotated[str | dict[str, str], PlainValidator(_choice), WithJsonSchema(TOOL_CHOICE)]
