"""Builds the answer of ``/v1/messages`` block by block, in two forms: the events of a stream, and the message that the
events add up to."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from shadowkv.serve.bodies.api_error import MESSAGES_URL, ApiError
from shadowkv.serve.openai.jobs import Job, Piece
from shadowkv.serve.text.tool_parser import CallPart

Event = dict[str, Any]

PING: Event = {"type": "ping"}

DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}
"""Maps a block's type to the type of its deltas, and to the name of the text field in the block and in its deltas."""

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageOutput:
    """The answer of a job with one choice.

    Attributes:
        answer: the message so far. A block's text or input is filled in when the block ends.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._block: dict[str, Any] | None = None
        self._sent: list[str] = []  # pieces of the current block's text, which are joined when the block ends
        self._call = -1
        self.answer: dict[str, Any] = {
            "id": job.id,
            "type": "message",
            "role": "assistant",
            "model": job.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yields all events of the stream. Raises ApiError or EngineDead."""
        begun = False
        async with aclosing(self._job.pieces()) as pieces:
            async for piece in pieces:
                if not begun:
                    begun = True
                    self.answer["usage"] = {**self._usage(), "output_tokens": 0}  # no token has been sent yet
                    yield {"type": "message_start", "message": self.answer}
                    yield PING
                for event in self._read(piece):
                    yield event
                if piece.finish_reason is not None:
                    for event in self._end(piece):
                        yield event

    @staticmethod
    def failure(error: ApiError) -> Event:
        """Returns the event that ends a failed stream."""
        return error.body(MESSAGES_URL)

    def _read(self, piece: Piece) -> Iterator[Event]:
        if piece.thought:
            yield from self._delta("thinking", piece.thought, signature="")
        if piece.text:
            yield from self._delta("text", piece.text)
        for part in piece.calls:
            yield from self._argue(part)

    def _delta(self, kind: str, text: str, **fields: Any) -> Iterator[Event]:
        """Yields the events for more text or reasoning."""
        delta, name = DELTAS[kind]
        if self._block is None or self._block["type"] != kind:
            yield from self._open({"type": kind, name: "", **fields})
        self._sent.append(text)
        yield self._event("content_block_delta", delta={"type": delta, name: text})

    def _argue(self, part: CallPart) -> Iterator[Event]:
        """Yields the events for a new call, or for more of a call's arguments."""
        if part.index != self._call:
            self._call = part.index
            yield from self._open({"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
        if part.arguments:
            self._sent.append(part.arguments)
            delta = {"type": "input_json_delta", "partial_json": part.arguments}
            yield self._event("content_block_delta", delta=delta)

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._block = block
        self.answer["content"].append(block)
        yield self._event("content_block_start", content_block=block)

    def _close(self) -> Iterator[Event]:
        """Yields the events that end the current block; none if no block is open."""
        block, text = self._block, "".join(self._sent)
        if block is None:
            return
        if block["type"] == "tool_use":
            block["input"] = _object(text)
        else:
            block[DELTAS[block["type"]][1]] = text
        yield self._event("content_block_stop")
        self._block, self._sent = None, []

    def _end(self, piece: Piece) -> Iterator[Event]:
        yield from self._close()
        assert piece.finish_reason is not None
        reason = STOP_REASONS[piece.finish_reason]
        if reason == "end_turn" and piece.stop_string is not None:
            reason = "stop_sequence"
        stopped = {"stop_reason": reason, "stop_sequence": piece.stop_string}
        self.answer |= {**stopped, "usage": self._usage()}
        yield {"type": "message_delta", "delta": stopped, "usage": self.answer["usage"]}
        yield {"type": "message_stop"}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "index": len(self.answer["content"]) - 1, **fields}

    def _usage(self) -> dict[str, int]:
        usage = self._job.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def _object(text: str) -> dict[str, Any]:
    """Returns a call's arguments as an object. It is empty if the answer was cut off inside the arguments."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
