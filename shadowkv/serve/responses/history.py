"""Makes conversations from stored responses. A response is stored with its own input only, and with the id of the
response that it continues. A conversation is therefore a chain of stored responses."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.bodies.limits import MAX_MESSAGES
from shadowkv.serve.storage.store import RecordStore

decode_body = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
"""Splits a body into its fields, each as raw JSON. Their content is not checked here, but by ``read_body``."""


CONTINUABLE = ("completed", "incomplete")
"""A response can be continued if it has one of these statuses."""


def input_items(raw: bytes) -> list[Any]:
    """Returns the items of a body's ``input``."""
    items: list[Any] = msgspec.json.decode(b"[" + _items(decode_body(_plain(raw))["input"]) + b"]")
    return items


class History:
    """The stored responses of one owner. An owner is an API key; without API keys, all clients are one owner.

    Args:
        limit: maximum length in bytes of a body, and also of a whole conversation.
    """

    def __init__(self, store: RecordStore, owner: str, limit: int) -> None:
        self._store, self._owner, self._limit = store, owner, limit

    def continued(self, raw: bytes, previous: str) -> bytes:
        """Returns the body with a longer ``input``: the conversation up to the response ``previous``, and then the
        body's own input. Raises ApiError if that conversation is not stored, or if it is too long."""
        turns, id = [_items(decode_body(_plain(raw))["input"])], previous
        size = len(raw)
        while id is not None:
            if len(turns) > MAX_MESSAGES:
                raise _too_long(f"it has more than {MAX_MESSAGES} turns")
            record = self._get(id, previous)
            value = record["input"] + record["response"]["output"]
            turns.append(msgspec.json.encode(value)[1:-1])
            size += len(turns[-1])
            if size > self._limit:
                raise _too_long(f"it has more than {self._limit} bytes, the limit for a body")
            id = record["response"]["previous_response_id"]
        whole = {**decode_body(_plain(raw)), "input": msgspec.Raw(b"[" + b",".join(filter(None, turns[::-1])) + b"]")}
        return msgspec.json.encode(whole)

    def _get(self, id: str, previous: str) -> dict[str, Any]:
        try:
            value: dict[str, Any] = self._store.get(self._owner, "response", id).value
            if (status := value["response"]["status"]) not in CONTINUABLE:
                text = f"response {id[:80]!r} cannot be continued: it has no answer, its status is {status}"
                raise ApiError(text, param="previous_response_id")
        except ApiError as error:
            if error.status != 404:
                raise
            text = f"there is no response {previous[:80]!r} of this API key"
            if id != previous:
                text = f"response {previous[:80]!r} cannot be continued: {id[:80]!r}, earlier in its conversation,"
                text += " has been deleted or evicted"
            raise ApiError(
                f"{text}: send the whole conversation as input",
                status=404,
                param="previous_response_id",
                code="previous_response_not_found",
            ) from error
        return value

    async def add(self, raw: bytes, answer: dict[str, Any]) -> None:
        """Stores an answer, and the input of the body that it answers. If that fails, ``store`` in the answer becomes
        false."""
        try:
            await asyncio.to_thread(self._add, raw, answer)
        except ApiError:
            answer["store"] = False

    def _add(self, raw: bytes, answer: dict[str, Any]) -> None:
        self._store.put(self._owner, "response", answer["id"], {"input": input_items(raw), "response": answer})


def _plain(raw: bytes) -> bytes:
    return bytes(raw).removeprefix(b"\xef\xbb\xbf")


def _items(given: msgspec.Raw) -> bytes:
    """Returns the items of ``input`` as JSON, separated by commas but without the brackets of a list."""
    text = bytes(given).strip()
    if text.startswith(b"["):
        return text[1:-1].strip()
    return b'{"type":"message","role":"user","content":' + text + b"}"


def _too_long(why: str) -> ApiError:
    text = f"the conversation of previous_response_id is too long: {why}"
    return ApiError(text, param="previous_response_id", code="context_length_exceeded")
