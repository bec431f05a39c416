"""What ``/openapi.json`` says of bodies beyond the types of fields: ranges, nulls, parameters that ask for nothing."""

from __future__ import annotations

from typing import Any

IGNORED = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
    + ("prediction", "include_obfuscation")
)
"""Parameters that do not change the answer."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "tool_calls": ([],),
    "annotations": ([],),
}
"""Parameters that are not supported, and the values of them that ask for nothing."""

RANGES: dict[str, dict[str, float]] = {
    "max_tokens": {"minimum": 0},
    "max_completion_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "temperature": {"minimum": 0, "maximum": 100},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**31 - 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 100},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "logprobs": {"minimum": 0, "maximum": 20},
    "top_logprobs": {"minimum": 0, "maximum": 20},
}
"""Of numbers that ``SamplingParams`` checks, whose refusals name all that are wrong at once."""

RESPONSE_FORMAT: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}, "json_schema": {}},
    "required": ["type"],
}


def complete(schema: dict[str, Any]) -> None:
    """Pydantic's ``json_schema_extra`` of every body: nothing else is taken, and null is the same as left out."""
    properties = schema["properties"]
    for name, value in properties.items():
        branches = value.get("anyOf", [value])
        for branch in branches:
            if branch.get("type") in ("integer", "number"):
                branch.update(RANGES.get(name, {}))
        if name not in schema.get("required", ()) and {"type": "null"} not in branches:
            about = {key: value.pop(key) for key in ("title", "default") if key in value}
            properties[name] = {**about, "anyOf": [*branches, {"type": "null"}]}
    for name in sorted(IGNORED - properties.keys()):
        properties[name] = {"description": "Has no effect."}
    for name in sorted(NEUTRAL.keys() - properties.keys()):
        values = NEUTRAL[name]
        unique = [value for index, value in enumerate(values) if value not in values[:index]]
        properties[name] = {"enum": [*unique, None], "description": "Not supported, and these ask for nothing."}
    schema["additionalProperties"] = False
