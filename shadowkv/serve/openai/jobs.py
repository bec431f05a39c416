"""``Job``: a validated request. It yields the answer in pieces. The HTTP server and the batch mode both use jobs."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from shadowkv.engine.outputs import TextOutput, TokenLogprobs
from shadowkv.prefix_cache.protocol import SaveError
from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.http.errors import TOO_LONG, DeadlineExceeded
from shadowkv.serve.openai.logprobs import scored_prompt, width
from shadowkv.serve.openai.protocol import ChatRequest, GenerationRequest, KVTransferParams, TextRequest
from shadowkv.serve.text.reasoning import ReasoningParser
from shadowkv.serve.text.tool_parser import CallPart, ToolParser

if TYPE_CHECKING:
    from shadowkv.engine.outputs import TokenSelections
    from shadowkv.engine.process.client import ClientRequest, EngineClient
    from shadowkv.models.tokenization.tokenizer import Tokenizer
    from shadowkv.serve.http.metrics import Metrics

logger = logging.getLogger(__name__)


@dataclass
class Piece:
    """A part of a choice, or a whole choice: the content of one chunk of a stream, or of one whole answer."""

    index: int
    text: str = ""
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: str | None = None
    first: bool = True
    offset: int = 0
    """Number of characters of all earlier tokens of the choice. It is counted only if log-probabilities are
    requested."""
    calls: Sequence[CallPart] = ()
    thought: str = ""
    stop_string: str | None = None
    selections: Sequence[TokenSelections | None] | None = None
    token_ids: Sequence[int] = ()
    stop_reason: str | int | None = None
    matched_stop: str | int | None = None
    """SGLang's field: ``stop_reason``, or the token with which the model ended its answer."""
    prompt_progress: dict[str, int] | None = None
    """Progress of the prompt's prefill. A piece with progress has no other content."""


@dataclass
class Job:
    """A validated request: each of a prompt's ``n`` choices is one request to the engine.

    Attributes:
        request: the request as a completion or a chat, to which all other APIs are converted.
        body: the request as received.
        choices: the requests to the engine, ``n`` for each prompt, prompt by prompt.
        reasoning, parsers: each choice's parsers of reasoning and of tool calls; None where there is nothing to parse.
        echo: for each prompt, the text that its choices begin with; None without an echo.
        deadline: time of ``time.monotonic`` at which the request times out, in seconds; None sets no limit.
        thinking_tokens: number of reasoning tokens of all choices so far.
        last_outputs: maps a choice's index to its latest output.
        prompt_scores: maps a choice's index to the log-probabilities of its prompt's tokens, if they are requested.
    """

    engine: EngineClient
    tokenizer: Tokenizer
    id: str
    request: GenerationRequest
    body: TextRequest
    model: str
    choices: list[ClientRequest]
    reasoning: list[ReasoningParser | None]
    parsers: list[ToolParser | None]
    echo: list[str] | None = None
    deadline: float | None = None
    metrics: Metrics | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.remote_prefill = RemotePrefill(self.engine, self.request.kv_transfer_params)
        self.last_outputs: dict[int, TextOutput] = {}
        self.prompt_scores: dict[int, Sequence[TokenLogprobs | None]] = {}
        self.thinking_tokens = 0

    async def outputs(self) -> AsyncGenerator[tuple[int, TextOutput], None]:
        """Yields the index of a choice and its next output, while the engine generates them. Raises ApiError if a
        choice fails. If other servers will continue the prompts, ends only when they can find them
        (``RemotePrefill.send``)."""
        prompts = self.choices[:: self.request.n]
        await self.remote_prefill.receive(sum(len(prompt.prompt_token_ids) for prompt in prompts))
        timeout = None if self.deadline is None else self.deadline - time.monotonic()
        async with AsyncExitStack() as stack:
            see = [stack.enter_context(self.metrics.observe()) for _ in self.choices if self.metrics is not None]
            if self.metrics is not None:
                self.metrics.asked(self.request.n, self.choices[0].params.max_tokens)
            outputs = await stack.enter_async_context(aclosing(self.engine.generate(self.choices, timeout)))
            try:
                async for index, output in outputs:
                    if see and not output.is_progress:
                        see[index](output)
                    if output.error is not None:
                        status = {None: 500, "nothing_follows": 400, "timeout": 504}[output.error_code]
                        param = None if output.error_code is None else "response_format"
                        code = output.error_code or "generation_failed"
                        raise ApiError(output.error, status=status, param=param, code=code)
                    if output.is_progress:
                        yield index, output
                        continue
                    first = index not in self.last_outputs
                    self.last_outputs[index] = output
                    if output.prompt_logprobs is not None:
                        self.prompt_scores[index] = output.prompt_logprobs
                    yield index, self._with_prompt(index, output) if first else output
            except asyncio.TimeoutError:
                raise DeadlineExceeded(TOO_LONG) from None
        await self.remote_prefill.send(prompts)

    def _with_prompt(self, index: int, output: TextOutput) -> TextOutput:
        """Returns a choice's first output, with the prompt in front if the request asks for an echo."""
        if self.echo is None:
            return output
        most = self.choices[index].params.logprobs
        steps = scored_prompt(self.choices[index].prompt_token_ids, output.prompt_logprobs, most)
        text = self.echo[index // self.request.n] + output.text
        return replace(output, text=text, logprobs=[*steps, *(output.logprobs or ())])

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yields the answer in pieces while it is generated. Raises ApiError, DeadlineExceeded, EngineBusy or
        EngineDead."""
        wants_logprobs = self.choices[0].params.logprobs is not None
        offsets: dict[int, int] = {}
        async with aclosing(self.outputs()) as outputs:
            async for index, output in outputs:
                if output.prefilled is not None:
                    yield Piece(index, first=False, prompt_progress=prompt_progress(output, output.prefilled))
                if output.is_progress:
                    continue
                logprobs = (output.logprobs or []) if wants_logprobs else None
                piece = self._read(index, *self._split(index, output), output.finish_reason)
                piece.selections = output.selections
                ids = output.token_ids if self.request.return_token_ids else ()
                has_content = piece.text or piece.thought or piece.calls or logprobs or piece.selections or ids
                if not (has_content or piece.finish_reason):
                    continue
                piece.token_ids, piece.stop_reason = ids, output.stop_reason
                piece.matched_stop = _matched_stop(output)
                piece.first, piece.offset = index not in offsets, offsets.get(index, 0)
                offsets[index] = piece.offset + width(self.tokenizer, logprobs or [])
                piece.logprobs, piece.stop_string = logprobs, output.stop_string
                yield piece

    async def joined_pieces(self) -> list[Piece]:
        """Returns the whole answer, with one piece per choice. Raises what ``pieces`` raises."""
        count, wants_logprobs = len(self.choices), self.choices[0].params.logprobs is not None
        thoughts: list[list[str]] = [[] for _ in range(count)]
        texts: list[list[str]] = [[] for _ in range(count)]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in range(count)]
        selections: list[list[TokenSelections | None]] = [[] for _ in range(count)]
        token_ids: list[list[int]] = [[] for _ in range(count)]
        async with aclosing(self.outputs()) as outputs:
            async for index, output in outputs:
                thought, text = self._split(index, output)
                thoughts[index].append(thought)
                texts[index].append(text)
                logprobs[index] += output.logprobs or ()
                selections[index] += output.selections or ()
                token_ids[index] += output.token_ids
        pieces = [
            self._read(index, "".join(thoughts[index]), "".join(texts[index]), self.last_outputs[index].finish_reason)
            for index in range(count)
        ]
        for piece in pieces:
            piece.calls = _whole_calls(piece)
            last = self.last_outputs[piece.index]
            piece.token_ids, piece.stop_reason, piece.matched_stop = (
                token_ids[piece.index],
                last.stop_reason,
                _matched_stop(last),
            )
            piece.stop_string = last.stop_string
            piece.logprobs = logprobs[piece.index] if wants_logprobs else None
            piece.selections = selections[piece.index] if self.request.return_selections else None
        return pieces

    def _split(self, index: int, output: TextOutput) -> tuple[str, str]:
        """Splits an output into reasoning and text, and counts the reasoning tokens."""
        reasoning = self.reasoning[index]
        if reasoning is None:
            return "", output.text
        parts = reasoning.push(output.text, output.finish_reason is not None)
        if reasoning.is_thinking:
            self.thinking_tokens += len(output.token_ids)
        return parts

    def _read(self, index: int, thought: str, text: str, end: str | None) -> Piece:
        """Makes the next piece of a choice, and splits its ``text`` into text and tool calls. ``end`` is the reason why
        the choice ended; None if it goes on."""
        parser = self.parsers[index]
        if parser is None:
            return Piece(index, text, finish_reason=end, thought=thought)
        text, calls = parser.push(text, end is not None)
        if self.request.one_call:
            calls = [part for part in calls if part.index == 0]
        reason = "tool_calls" if end == "stop" and parser.calls else end
        return Piece(index, text, finish_reason=reason, calls=calls, thought=thought)

    def usage(self) -> dict[str, Any]:
        """Token counts so far. The tokens of a prompt are counted once for all of its choices. If the server separates
        reasoning from text, there is also a count of reasoning tokens. If the request has a prediction, there are
        counts of accepted and of rejected drafted tokens. If the request asks, there is what the quality meter has
        found."""
        prompts = [output for index, output in self.last_outputs.items() if index % self.request.n == 0]
        thinks = any(reasoning is not None for reasoning in self.reasoning)
        details = {"reasoning_tokens": self.thinking_tokens} if thinks else {}
        if isinstance(self.request, ChatRequest) and self.request.prediction is not None:
            outputs = self.last_outputs.values()
            details["accepted_prediction_tokens"] = sum(output.accepted_drafts for output in outputs)
            details["rejected_prediction_tokens"] = sum(output.rejected_drafts for output in outputs)
        separate = {"completion_tokens_details": details} if details else {}
        if self.request.return_quality:
            separate["quality"] = _quality(self.last_outputs.values())
        return {**_usage(prompts, self.last_outputs.values()), **separate}

    def usage_of(self, index: int, has_begun: bool = True) -> dict[str, Any]:
        """Token counts so far of one choice and its prompt. Without ``has_begun``, no tokens of the choice are
        counted."""
        outputs = [self.last_outputs[index]] if index in self.last_outputs else []
        return _usage(outputs, outputs if has_begun else [])

    def metrics_of(self, index: int) -> dict[str, float]:
        """Times of a choice in milliseconds, under vLLM's names: the time from the start of prefill to the first token,
        the time from the first token to the last, and the time in the queue. If there are at least two tokens, also the
        mean time between tokens. The last figure is the number of tokens per second since the start of prefill."""
        output = self.last_outputs[index]
        times, tokens = output.times, output.completion_tokens
        scheduled = times.arrival if times.scheduled is None else times.scheduled
        first = scheduled if times.first_token is None else times.first_token
        last = first if times.last_token is None else times.last_token
        between = {"mean_itl_ms": 1000 * (last - first) / (tokens - 1)} if tokens > 1 else {}
        return {
            "time_to_first_token_ms": 1000 * (first - scheduled),
            "generation_time_ms": 1000 * (last - first),
            "queue_time_ms": 1000 * (scheduled - times.arrival),
            **between,
            "tokens_per_second": tokens / (last - scheduled) if last > scheduled else 0.0,
        }

    def timings_of(self, index: int) -> dict[str, float]:
        """Times of a choice so far, in milliseconds, under llama.cpp's names. The first generated token counts as part
        of the prompt."""
        output = self.last_outputs[index]
        times, written = output.times, output.completion_tokens
        first = times.first_token or times.arrival
        prompt, answer = first - (times.scheduled or times.arrival), (times.last_token or first) - first
        read = output.prompt_tokens - output.cached_tokens
        return _timings(output.cached_tokens, read, prompt, written, answer)

    def head(self, kind: str) -> dict[str, Any]:
        """Returns the fields with which every answer and every chunk begins."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def _usage(prompts: Iterable[TextOutput], answers: Iterable[TextOutput]) -> dict[str, Any]:
    prompts = list(prompts)
    prompt = sum(output.prompt_tokens for output in prompts)
    completion = sum(output.completion_tokens for output in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in prompts)},
    }


def _quality(answers: Iterable[TextOutput]) -> dict[str, Any]:
    checked = [output.checked for output in answers if output.checked is not None]
    tokens = sum(one.tokens for one in checked)
    return {"checked_tokens": tokens, "kl": sum(one.kl for one in checked) / tokens if tokens else None}


def _matched_stop(output: TextOutput) -> str | int | None:
    """Returns ``matched_stop`` for an output. It is None if the answer goes on or was cut off."""
    if output.stop_reason is not None or output.finish_reason != "stop" or not output.token_ids:
        return output.stop_reason
    return output.token_ids[-1]


def _whole_calls(piece: Piece) -> Sequence[CallPart]:
    """Returns the tool calls of a whole answer. If the answer was cut off inside its last call, that is left out."""
    if not piece.calls or piece.finish_reason not in ("length", "repetition"):
        return piece.calls
    try:
        json.loads(piece.calls[-1].arguments)
    except ValueError:
        return piece.calls[:-1]
    return piece.calls


def prompt_progress(output: TextOutput, processed: int) -> dict[str, int]:
    """Returns llama.cpp's ``prompt_progress``. The prompt has ``total`` tokens, of which ``processed`` are done. Of
    these, ``cache`` came from the prefix cache. ``time_ms`` is the time since prefill began."""
    times = output.times
    seconds = (times.first_token or time.monotonic()) - (times.scheduled or times.arrival)
    counts = {"total": output.prompt_tokens, "cache": output.cached_tokens, "processed": processed}
    return {**counts, "time_ms": round(1000 * max(0.0, seconds))}


def progress_timings(progress: Mapping[str, int]) -> dict[str, float]:
    """Returns llama.cpp's ``timings`` for a chunk that has ``prompt_progress``."""
    read = progress["processed"] - progress["cache"]
    return _timings(progress["cache"], read, progress["time_ms"] / 1000 if read else 0.0, 0, 0.0)


def _timings(cached: int, read: int, prompt: float, written: int, answer: float) -> dict[str, float]:
    """Returns llama.cpp's ``timings`` for ``read`` prompt tokens computed in ``prompt`` seconds and ``written`` answer
    tokens generated in ``answer`` seconds. Another ``cached`` prompt tokens came from the prefix cache."""
    counts = {"cache_n": cached, "prompt_n": read, "predicted_n": written}
    return {**counts, **_pace("prompt", read, prompt), **_pace("predicted", max(0, written - 1), answer)}


def _pace(name: str, steps: int, seconds: float) -> dict[str, float]:
    milliseconds = 1000 * max(0.0, seconds)
    return {
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / steps if steps else 0.0,
        f"{name}_per_second": 1000 * steps / milliseconds if milliseconds > 0 else 0.0,
    }


class RemotePrefill:
    """``kv_transfer_params``, with vLLM's names: one server computes a request's prompts, and another server continues
    them.

    A proxy sends a request to a prefill server, with ``max_tokens`` 1 and ``do_remote_decode``. Then the proxy sends
    the request to a decode server, with the ``kv_transfer_params`` of the prefill server's answer. These name snapshots
    in a directory that both servers share. The decode server computes whatever is missing there.

    Args:
        engine: the engine that serves the request.
        params: the request's ``kv_transfer_params``.
    """

    def __init__(self, engine: EngineClient, params: KVTransferParams | None) -> None:
        self._engine, self._params = engine, params or KVTransferParams()
        self._sent: list[str] = []

    async def receive(self, tokens: int) -> None:
        """Waits until this server can find the prompts that another server has computed, which have ``tokens`` tokens
        in total. Waits at most about as long as it would take to compute them here."""
        if self._params.do_remote_prefill and not await self._engine.expect(
            tuple(self._params.remote_snapshots), tokens
        ):
            logger.warning("prompts of %d tokens have not arrived in time; the missing ones are computed", tokens)

    async def send(self, prompts: Sequence[ClientRequest]) -> None:
        """Saves the computed prompts for other servers, and waits until these servers can find them. Does nothing
        unless the request has ``do_remote_decode`` or this is a prefill server."""
        if self._params.do_remote_decode or self._engine.role == "prefill":
            sent = await asyncio.gather(*map(self._hand_over, prompts))
            self._sent = list(dict.fromkeys(name for names in sent for name in names))

    async def _hand_over(self, prompt: ClientRequest) -> tuple[str, ...]:
        """Saves a prompt and returns the names of its snapshots. A failure is only logged, and no names are returned,
        because the decode server can compute the prompt itself."""
        try:
            return await self._engine.hand_over(prompt)
        except (SaveError, asyncio.TimeoutError) as error:
            reason = str(error) or "the disk was too slow"
            logger.warning("a prompt of %d tokens is not handed over: %s", len(prompt.prompt_token_ids), reason)
            return ()

    def answer_field(self) -> dict[str, Any]:
        """Returns the answer's field ``kv_transfer_params`` if the request has ``do_remote_decode``; otherwise no
        field. The field is None if no snapshot was saved."""
        if not self._params.do_remote_decode:
            return {}
        names = {"do_remote_prefill": True, "do_remote_decode": False, "remote_snapshots": self._sent}
        return {"kv_transfer_params": names if self._sent else None}
