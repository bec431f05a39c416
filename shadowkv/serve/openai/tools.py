"""``tools`` and ``tool_choice``: the functions that a model can call, and whether an answer must call one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema

from shadowkv.serve.bodies.body import Body, Text, at_most, bounded, wrong
from shadowkv.serve.bodies.limits import MAX_NAME_CHARS, MAX_TOOLS, MAX_TOOLS_CHARS

NOTHING = {"type": "object", "properties": {}}
"""Parameters of a function that takes no arguments."""

TOOL_CHOICE: dict[str, Any] = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            },
            "required": ["type", "function"],
        },
    ]
}

FunctionName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


def _parameters(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("type", "object") != "object":
        raise wrong(f"type must be 'object', not {str(value['type'])[:40]!r}, because arguments have names")
    return {"type": "object", **value} if value else NOTHING


class Function(Body):
    """A function. ``parameters`` is the JSON schema of its arguments. As in vLLM, ``strict`` has no effect. If
    ``tool_choice`` forces a call, its arguments always follow the schema. Otherwise nothing makes the model follow
    it."""

    name: FunctionName
    description: Text | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_parameters)] = NOTHING
    strict: bool | None = None


class Tool(Body):
    """A tool. Functions are the only type of tools."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Returns the tool in the form that chat templates expect."""
        return {"type": "function", "function": self.function.model_dump(exclude={"strict"}, exclude_none=True)}


def within_limits(value: Any) -> Any:
    """Checks the size of all tools together, before any tool is validated."""
    return bounded(MAX_TOOLS_CHARS, value)


def _different(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = set()
    for tool in tools:
        name = tool["function"]["name"]
        if name in names:
            raise wrong(f"there are two functions with the name {name!r}; names must differ")
        names.add(name)
    return tools


# Like messages, tools are validated as pydantic models, and then kept as the dictionaries that templates expect.
if TYPE_CHECKING:
    TemplateTool = dict[str, Any]
else:
    TemplateTool = Annotated[Tool, AfterValidator(Tool.for_template)]
Tools = Annotated[
    list[TemplateTool],
    Field(max_length=MAX_TOOLS, fail_fast=True),
    BeforeValidator(within_limits),
    AfterValidator(_different),
]


Kind = Literal["none", "auto", "required", "function"]
WORDS: tuple[Kind, ...] = ("none", "auto", "required")
"""Values of ``tool_choice`` that are a single word."""


@dataclass(frozen=True)
class Choice:
    """Whether an answer must call a tool, and which one. If ``kind`` is "function", ``name`` is the function to
    call."""

    kind: Kind
    name: str | None = None

    @property
    def is_forced(self) -> bool:
        """Whether the answer must call a tool."""
        return self.kind in ("required", "function")

    def __str__(self) -> str:
        return repr(self.kind if self.name is None else self.name)


def _choice(value: Any) -> Choice:
    for kind in WORDS:
        if value == kind:
            return Choice(kind)
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise wrong("must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': …}}")
    at_most(MAX_NAME_CHARS, "characters of a name", len(name))
    return Choice("function", name)


ToolChoice = Annotated[Choice, PlainValidator(_choice), WithJsonSchema(TOOL_CHOICE)]
