"""Chat templates: a list of messages -> the prompt text, rendered by a sandboxed Jinja."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """A compiled template; raises ValueError if its source is no valid template."""

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the chat template is not valid: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt; raises ValueError with the template's own words where it refuses the messages."""
        try:
            return self._template.render(messages=messages, **variables)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own tojson escapes HTML characters, which a model has never seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
