"""Chat templates: they render a list of messages to the prompt text, in a sandboxed Jinja with limits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError

from shadowkv.models.checkpoints.files import is_there, read_text
from shadowkv.models.tokenization.template_bounds import MAX_CHARACTERS, BoundedEnvironment, as_text, bounded

__all__ = ["MAX_CHARACTERS", "ChatTemplate"]

MAX_SOURCE_CHARACTERS = 1 << 16
"""Maximum length of a template. Compiling longer ones takes seconds; real models' longest templates have 20,000
characters."""
COMPILER_ERRORS = (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError)
"""Errors of Python's compiler for the code that Jinja makes of a template. They have causes such as 20 nested loops,
lone surrogates, and numbers or expressions that are too large."""
_MAX_ERROR_CHARACTERS = 400


def template_source(given: str) -> str:
    """The source of a template: a text with braces or several lines is the template itself, as in vLLM; other texts
    name a file. Raises OSError if the file does not exist, ModelFileError if it cannot be used."""
    if any(character in given for character in "{}\n"):
        return given
    file = Path(given).expanduser()
    if not is_there(file):
        raise FileNotFoundError("there is no such file, and a template would have braces")
    if file.is_dir():
        raise IsADirectoryError("this is a directory; name the template's file")
    return read_text(file)


class ChatTemplate:
    """A compiled template; raises ValueError if its source is not a valid template.

    Args:
        source: the template in Jinja.
        cleaned: removes from an error message what clients must not see. It is called before the message is shortened.
    """

    def __init__(self, source: str, cleaned: Callable[[str], str] = str) -> None:
        self._cleaned = cleaned
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise ValueError(f"the chat template has more than {MAX_SOURCE_CHARACTERS} characters")
        environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.add_filter("tojson", _to_json)
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid: line {error.lineno}: {_short(error)}") from error
        except COMPILER_ERRORS as error:
            raise ValueError(f"the chat template is not valid: {_short(error)}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt, of at most ``MAX_CHARACTERS``.

        Raises ValueError if the template refuses the messages; the error has the template's own message. Raises it also
        if the template fails, takes too long or exceeds a limit of ``template_bounds``.
        """
        try:
            with bounded():
                prompt = self._template.render(messages=messages, **variables)
            prompt.encode()
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {_short(error, self._cleaned)}") from error
        except Exception as error:  # a template is a program and can fail in any way
            reason = f"{type(error).__name__}: {_short(error, self._cleaned)}"
            raise ValueError(f"the chat template fails on these messages: {reason}") from error
        return prompt


def _short(error: Exception, cleaned: Callable[[str], str] = str) -> str:
    """The error's message, in one line."""
    text = cleaned(str(error.message if isinstance(error, TemplateSyntaxError) else error))
    text = " ".join(text[: _MAX_ERROR_CHARACTERS + 1].split())
    return text if len(text) <= _MAX_ERROR_CHARACTERS else f"{text[:_MAX_ERROR_CHARACTERS]}…"


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own tojson escapes HTML characters, a form that models have never seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: Any) -> NoReturn:
    raise TemplateError(as_text(message))
