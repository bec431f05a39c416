"""Base classes of other APIs' bodies. Such a body is converted to a completion or a chat of the OpenAI API when it is
read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr, ValidationError

from shadowkv.serve.bodies.api_error import from_validation
from shadowkv.serve.bodies.body import Body, at_most
from shadowkv.serve.bodies.limits import MAX_MESSAGES
from shadowkv.serve.openai.messages import Variables
from shadowkv.serve.openai.protocol import ChatRequest, GenerationRequest, Sampling

PART_LISTS = ("content", "output", "summary")
"""Fields of items, messages and blocks that hold lists of parts."""

SHARED = (Sampling.model_fields.keys() | {"chat_template_kwargs"}) - {"model", "stream"}
"""Parameters with the same name and meaning in several APIs."""


def few_parts(value: Any) -> Any:
    """Returns ``value``, a list of items, messages or blocks. Raises an error if these have too many parts in total.
    The check runs before any part is validated."""
    level, count = value if isinstance(value, list) else [], 0
    while level:
        lists = [item.get(name) for item in level if isinstance(item, dict) for name in PART_LISTS]
        level = [part for parts in lists if isinstance(parts, list) for part in parts]
        count += len(level)
        at_most(MAX_MESSAGES, "content parts", count)
    return value


class Converted(Body):
    """A body that is converted to a completion or a chat.

    Attributes:
        target: the class of the completion or chat.
        names: maps parameters of ``target`` to their names in this API, where these differ.
    """

    target: ClassVar[type[GenerationRequest]]
    names: ClassVar[Mapping[str, str]]

    _generation: GenerationRequest | None = PrivateAttr(None)

    @property
    def generation(self) -> GenerationRequest:
        """The equivalent completion or chat."""
        assert self._generation is not None, "finish was not called"
        return self._generation

    def finish(self) -> None:
        try:
            self._generation = self.target.model_validate(self.as_generation())
        except ValidationError as error:
            raise from_validation(error.errors(include_url=False)).renamed(self.names) from error

    @property
    def shared(self) -> dict[str, Any]:
        """The parameters of ``SHARED`` that the request sets."""
        # ``model_fields_set`` also names unknown fields, which have already been dropped.
        return {name: getattr(self, name) for name in SHARED & self.model_fields_set & type(self).model_fields.keys()}

    @abstractmethod
    def as_generation(self) -> dict[str, Any]:
        """Returns the body of the completion or chat as an object."""


class ConvertedChat(Converted):
    """A body that is converted to a chat."""

    target = ChatRequest

    chat_template_kwargs: Variables = Field({})

    def finish(self) -> None:
        super().finish()
        self.drop()

    def as_generation(self) -> dict[str, Any]:
        return {**self.shared, **self.as_chat()}

    @abstractmethod
    def as_chat(self) -> dict[str, Any]:
        """Returns the body of the chat as an object, without the parameters in ``shared``."""

    @abstractmethod
    def drop(self) -> None:
        """Drops this body's copy of the conversation, because the chat has its own copy."""
