"""Bodies of APIs that express a chat differently: each becomes a ``ChatRequest`` where it is read. And what they are
made of: unions that are discriminated by ``type``, with errors from the matching one alone, and lists of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, PrivateAttr, Tag, ValidationError

from shadowkv.serve.bodies.api_error import TAG, from_validation
from shadowkv.serve.bodies.body import Body, at_most
from shadowkv.serve.bodies.limits import MAX_MESSAGES
from shadowkv.serve.openai.messages import Variables
from shadowkv.serve.openai.protocol import ChatRequest, Sampling

PART_LISTS = ("content", "output", "summary")
"""Fields of items, messages and blocks that have parts of their own."""

SHARED = (Sampling.model_fields.keys() | {"chat_template_kwargs"}) - {"model", "stream"}
"""Parameters that mean the same everywhere."""


def union_by_type(kinds: dict[str, type[Body]], what: str, default: str | None = None) -> Any:
    """The union, as a type.

    Args:
        kinds: bodies by their ``type``.
        what: the others in words, for the refusal that says they are not supported.
        default: type of a body that has none.
    """

    def tag(value: Any) -> str | None:
        kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None)
        return f"{TAG}{kind}" if isinstance(kind, str) and kind in kinds else None

    members = [Annotated[body, Tag(f"{TAG}{kind}")] for kind, body in kinds.items()]
    message = f"type must be {' or '.join(map(repr, kinds))}; {what} are not supported"
    discriminator = Discriminator(tag, custom_error_type="type", custom_error_message=message)
    return Annotated[reduce(or_, members), discriminator]


def few_parts(value: Any) -> Any:
    """A list of items, messages or blocks, if together they do not have too many parts: checked before any is looked at
    individually."""
    level, count = value if isinstance(value, list) else [], 0
    while level:
        lists = [item.get(name) for item in level if isinstance(item, dict) for name in PART_LISTS]
        level = [part for parts in lists if isinstance(parts, list) for part in parts]
        count += len(level)
        at_most(MAX_MESSAGES, "content parts", count)
    return value


class Converted(Body):
    """A body that is converted to a chat.

    Attributes:
        names: what a chat's parameters are called here, where that differs.
    """

    names: ClassVar[Mapping[str, str]]

    chat_template_kwargs: Variables = Field({})
    _chat: ChatRequest | None = PrivateAttr(None)

    @property
    def chat(self) -> ChatRequest:
        """The equivalent chat."""
        assert self._chat is not None, "finish was not called"
        return self._chat

    def finish(self) -> None:
        given = {name: getattr(self, name) for name in SHARED & self.model_fields_set}
        try:
            self._chat = ChatRequest.model_validate({**given, **self.as_chat()})
        except ValidationError as error:
            raise from_validation(error.errors(include_url=False)).renamed(self.names) from error
        self.drop()

    @abstractmethod
    def as_chat(self) -> dict[str, Any]:
        """Body of the chat, without the shared parameters."""

    @abstractmethod
    def drop(self) -> None:
        """Drops the conversation, which the chat has now."""
