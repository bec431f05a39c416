"""Builds the answer of ``/v1/responses`` item by item, in two forms: the events of a stream, and the response that the
events add up to."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.openai.jobs import Job, Piece
from shadowkv.serve.openai.logprobs import chat_logprobs
from shadowkv.serve.responses.protocol import ResponsesRequest
from shadowkv.serve.text.tool_parser import CallPart

Event = dict[str, Any]

PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
"""Maps an item's type to the prefix of its id."""

ENDS = ("response.completed", "response.incomplete")


class ResponseOutput:
    """The answer of a job with one choice.

    Attributes:
        answer: the response so far. An item's text or arguments are filled in when the item ends.
    """

    def __init__(self, job: Job) -> None:
        assert isinstance(job.body, ResponsesRequest)
        self._job, self._sequence = job, 0
        self._keep = None if job.body.background else job.body.keep  # ``Background`` stores background responses
        self._functions = job.body.functions
        self._item: dict[str, Any] | None = None
        self._sent: list[str] = []  # pieces of the current item's text, which are joined when the item ends
        self._scores: list[dict[str, Any]] = []  # log-probabilities of the current item's tokens
        self._is_thinking = self._thinks()
        self._new_scores: list[dict[str, Any]] = []  # log-probabilities of tokens whose text is not sent yet
        self._call = -1
        self._tokens: list[int] = []  # token ids of the answer, if requested
        self.answer = _asked(job, job.body)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yields all events of the stream. Raises ApiError or EngineDead."""
        begun = False
        async with aclosing(self._job.pieces()) as pieces:
            async for piece in pieces:
                if not begun:
                    begun = True
                    yield self._of_response("created")
                    yield self._of_response("in_progress")
                if piece.prompt_progress is not None:  # llama.cpp reports progress in such events, too
                    yield {**self._of_response("in_progress"), "prompt_progress": piece.prompt_progress}
                    continue
                self._tokens += piece.token_ids
                timings = {"timings": self._job.timings_of(0)} if self._job.request.timings_per_token else {}
                for event in self._read(piece):
                    yield {**event, **timings} if event["type"].endswith(".delta") else event
                if piece.finish_reason is not None:
                    for event in self._end(piece.finish_reason):
                        if event["type"] in ENDS and self._keep is not None:
                            await self._keep(self.answer)  # stored before the client can refer to it
                        yield {**event, **timings} if event["type"] in ENDS else event

    def failure(self, error: ApiError) -> Event:
        """Marks the response as failed, and returns the event that ends a failed stream."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        self._write()
        self.answer |= {"status": "failed", "error": {"code": code, "message": error.message}}
        return self._of_response("failed")

    # -- pieces ----------------------------------------------------------------------------------------------------

    def _read(self, piece: Piece) -> Iterator[Event]:
        was_thinking, self._is_thinking = self._is_thinking, self._thinks()
        if piece.text or not (was_thinking or piece.thought or piece.calls):
            self._new_scores += _scores(self._job, piece)
        else:
            self._new_scores = []
        if piece.thought:
            yield from self._delta("reasoning", "reasoning_text", piece.thought)
        if piece.text:
            yield from self._delta("message", "output_text", piece.text)
        for part in piece.calls:
            yield from self._argue(part)

    def _thinks(self) -> bool:
        """Whether the latest text is reasoning."""
        reasoning = self._job.reasoning[0]
        return reasoning is not None and reasoning.is_thinking

    def _delta(self, kind: str, part_kind: str, text: str) -> Iterator[Event]:
        """Yields the events for more text of a message or of reasoning."""
        if self._item is None or self._item["type"] != kind:
            yield from self._close("completed")
            more: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            self._item = item = self._new(kind, **more, content=[])
            yield self._of_item("output_item.added", item=item)
            item["content"].append(_part(part_kind))
            yield self._of_item("content_part.added", content_index=0, part=item["content"][0])
        assert self._item is not None
        if text:
            self._sent.append(text)
            yield self._of_item(f"{part_kind}.delta", content_index=0, delta=text, **self._logprobs(part_kind))

    def _logprobs(self, part_kind: str) -> dict[str, Any]:
        """Returns a field with the log-probabilities of the tokens whose text is sent next; no field for reasoning."""
        if part_kind != "output_text":
            return {}
        scores, self._new_scores = self._new_scores, []
        self._scores += scores
        return {"logprobs": scores}

    def _argue(self, part: CallPart) -> Iterator[Event]:
        """Yields the events for a new call, or for more of a call's arguments."""
        if part.index != self._call:
            yield from self._close("completed")
            self._call = part.index
            assert part.name is not None
            function, namespace = self._functions.get(part.name, (None, None))
            names = {"name": part.name if function is None else function.name}
            names |= {} if namespace is None else {"namespace": namespace}
            self._item = self._new("function_call", call_id=part.id, **names, arguments="")
            yield self._of_item("output_item.added", item=self._item)
        assert self._item is not None
        if part.arguments:
            self._sent.append(part.arguments)
            yield self._of_item("function_call_arguments.delta", delta=part.arguments)

    def _write(self) -> None:
        """Writes the text generated so far into the current item."""
        item, text = self._item, "".join(self._sent)
        if item is not None and item["type"] == "function_call":
            item["arguments"] = text
        elif item is not None:
            item["content"][0]["text"] = text

    def _close(self, status: str) -> Iterator[Event]:
        """Yields the events that end the current item; none if no item is open."""
        item = self._item
        if item is None:
            return
        self._write()
        item["status"] = status
        if item["type"] == "function_call":
            call = {"name": item["name"], "arguments": item["arguments"]}
            yield self._of_item("function_call_arguments.done", **call)
        else:
            part = item["content"][0]
            done = {"content_index": 0, "text": part["text"]}
            if self._logprobs(part["type"]):
                part["logprobs"] = done["logprobs"] = self._scores
            yield self._of_item(f"{part['type']}.done", **done)
            yield self._of_item("content_part.done", content_index=0, part=part)
        yield self._of_item("output_item.done", item=item)
        self._item, self._sent, self._scores = None, [], []

    def _end(self, reason: str) -> Iterator[Event]:
        if not self.answer["output"]:
            yield from self._delta("message", "output_text", "")
        status = "incomplete" if reason == "length" else "completed"
        yield from self._close(status)
        usage, thinking = self._job.usage(), self._job.thinking_tokens
        self.answer |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "completed_at": int(time.time()) if status == "completed" else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": thinking},
                "total_tokens": usage["total_tokens"],
            },
        }
        if self._job.request.return_token_ids:
            prompt = self._job.choices[0].prompt_token_ids
            self.answer |= {"input_messages": [self._raw(prompt)], "output_messages": [self._raw(self._tokens)]}
        yield self._of_response(status)

    def _raw(self, tokens: list[int]) -> dict[str, Any]:
        """Returns a prompt or an answer in the form of vLLM's ``enable_response_messages``."""
        text = self._job.tokenizer.decode(tokens, skip_special_tokens=False)
        return {"type": "raw_message_tokens", "message": text, "tokens": tokens}

    # -- events ----------------------------------------------------------------------------------------------------

    def _new(self, kind: str, **fields: Any) -> dict[str, Any]:
        item = {"type": kind, "id": f"{PREFIXES[kind]}_{uuid.uuid4().hex}", "status": "in_progress", **fields}
        self.answer["output"].append(item)
        return item

    def _of_item(self, kind: str, **fields: Any) -> Event:
        assert self._item is not None
        if "item" not in fields:
            fields["item_id"] = self._item["id"]
        return self._event(kind, output_index=len(self.answer["output"]) - 1, **fields)

    def _of_response(self, kind: str) -> Event:
        return self._event(kind, response=self.answer)

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": f"response.{kind}", "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event


def _part(kind: str) -> dict[str, Any]:
    return {"type": kind, "text": "", **({"annotations": [], "logprobs": []} if kind == "output_text" else {})}


def _scores(job: Job, piece: Piece) -> list[dict[str, Any]]:
    """Returns the log-probabilities of a piece's tokens as in a chat, with one difference. If a token is only a part of
    a character, its ``bytes`` are an empty list: this API does not allow null."""
    content: list[dict[str, Any]] = chat_logprobs(job.tokenizer, piece.logprobs or ())["content"]
    for token in content:
        for score in (token, *token["top_logprobs"]):
            score["bytes"] = score["bytes"] or []
    return content


def _asked(job: Job, body: ResponsesRequest) -> dict[str, Any]:
    """Returns a response with the request's parameters, and without output."""
    params = job.choices[0].params
    return {
        "id": job.id,
        "object": "response",
        "created_at": job.created,
        "completed_at": None,
        "status": "in_progress",
        "background": body.background,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata,
        "model": job.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.keep is not None,
        "temperature": params.temperature,
        "text": {"format": body.text.format.repeated, "verbosity": body.text.verbosity or "medium"},
        "tool_choice": body.tool_choice or ("auto" if body.tools else "none"),
        "tools": [tool.repeated for tool in body.tools],
        "top_logprobs": body.top_logprobs,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
    }
