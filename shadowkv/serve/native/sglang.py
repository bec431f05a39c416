"""SGLang's ``/generate``. A request has prompts as text or as token ids. Answers have both."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from shadowkv.engine.outputs import TokenLogprobs
from shadowkv.serve.bodies.body import Body, Name, refusal
from shadowkv.serve.http.replies import Events
from shadowkv.serve.native.converted import NativeRequest
from shadowkv.serve.openai.completions import Completions
from shadowkv.serve.openai.jobs import Job, Piece
from shadowkv.serve.openai.logprobs import LOWEST

NEW_TOKENS = 128
"""Value of ``max_new_tokens`` for a request without it, as in SGLang."""

NAMES = MappingProxyType({"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "prompt": "text"})

SAMPLING = frozenset(
    ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens")
    + ("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "n")
    + ("json_schema", "regex", "ebnf")
)
"""Parameters that a completion has under the same name."""


ONE_OR_MORE: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


class GenerateSampling(Body):
    """The parameters in ``sampling_params`` that a completion names differently. All others are checked when the
    completion is made."""

    max_new_tokens: int = NEW_TOKENS
    min_new_tokens: int | None = None
    sampling_seed: int | None = None


class GenerateRequest(NativeRequest):
    """Body of ``/generate``."""

    names = NAMES

    text: Annotated[Any, WithJsonSchema(ONE_OR_MORE)] = None
    input_ids: Annotated[Any, WithJsonSchema({"type": "array", "items": {}})] = None
    sampling_params: dict[str, Any] = Field({})
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start_len: int = -1
    rid: Name | None = None

    def as_generation(self) -> dict[str, Any]:
        if (self.text is None) == (self.input_ids is None):
            raise refusal("text", "pass either text or input_ids")
        texts = self.text if isinstance(self.text, list) else [self.text]
        if self.text is not None and not all(isinstance(text, str) for text in texts):
            raise refusal("text", "text must be a string or a list of strings")
        ids = self.input_ids
        if ids is not None and not (isinstance(ids, list) and not any(isinstance(one, str) for one in ids)):
            raise refusal("input_ids", "input_ids must be a list of token ids, or a list of such lists")
        sampling = GenerateSampling.model_validate(
            {name: value for name, value in self.sampling_params.items() if name not in SAMPLING}
        )
        most = self.top_logprobs_num if self.return_logprob else None
        return {
            **{name: value for name, value in self.sampling_params.items() if name in SAMPLING},
            "prompt": self.input_ids if self.text is None else self.text,
            "max_tokens": sampling.max_new_tokens,
            "min_tokens": sampling.min_new_tokens,
            "seed": sampling.sampling_seed,
            "request_id": self.rid,
            "logprobs": most,
            "prompt_logprobs": most if self.logprob_start_len >= 0 else None,
            "return_token_ids": True,
            "stream": self.stream,
        }


class Generate(Completions):
    """The endpoint ``/generate``."""

    url = "/generate"
    request_type = GenerateRequest
    id_prefix = ""
    names = NAMES

    async def answer(self, job: Job) -> Any:
        """Returns a choice. If there are several, or if the request has a list of prompts, returns a list of
        choices."""
        choices = [self._choice(job, piece) for piece in await job.joined_pieces()]
        return choices if len(choices) > 1 or _is_batch(job) else choices[0]

    def stream(self, job: Job) -> Events:
        return Events(self._events(job))

    async def _events(self, job: Job) -> AsyncGenerator[dict[str, Any], None]:
        """Yields events. Each has the whole text of a choice so far."""
        whole: dict[int, Piece] = {}
        async with aclosing(job.pieces()) as pieces:
            async for piece in pieces:
                seen = whole.setdefault(piece.index, Piece(piece.index))
                seen.text += piece.text
                seen.token_ids = [*seen.token_ids, *piece.token_ids]
                if piece.logprobs is not None:
                    seen.logprobs = [*(seen.logprobs or ()), *piece.logprobs]
                seen.finish_reason, seen.stop_reason = piece.finish_reason, piece.stop_reason
                choice = self._choice(job, seen)
                yield {**choice, "index": piece.index} if len(job.choices) > 1 else choice

    def _choice(self, job: Job, piece: Piece) -> dict[str, Any]:
        output = job.last_outputs[piece.index]
        about: dict[str, Any] = {
            "id": job.id,
            "finish_reason": _end(piece),
            "prompt_tokens": output.prompt_tokens,
            "completion_tokens": output.completion_tokens,
            "cached_tokens": output.cached_tokens,
        }
        if piece.logprobs is not None:
            about["output_token_logprobs"] = [_score(step) for step in piece.logprobs]
            about["output_top_logprobs"] = [_top(step) for step in piece.logprobs]
        if (scores := job.prompt_scores.get(piece.index)) is not None:
            first = job.choices[piece.index].prompt_token_ids[0]
            about["input_token_logprobs"] = [[None, first, None] if one is None else _score(one) for one in scores]
            about["input_top_logprobs"] = [None if one is None else _top(one) for one in scores]
        return {"text": piece.text, "output_ids": list(piece.token_ids), "meta_info": about}


def _is_batch(job: Job) -> bool:
    assert isinstance(job.body, GenerateRequest)
    asked = job.body.input_ids if job.body.text is None else job.body.text
    return isinstance(asked, list) and not (asked and isinstance(asked[0], int))


def _end(piece: Piece) -> dict[str, Any] | None:
    if piece.finish_reason is None:
        return None
    if piece.finish_reason == "length":
        return {"type": "length", "length": len(piece.token_ids)}
    return {"type": "stop", "matched": piece.matched_stop}


def _score(step: TokenLogprobs) -> list[Any]:
    return [max(step.logprob, LOWEST), step.token_id, None]


def _top(step: TokenLogprobs) -> list[list[Any]]:
    return [[max(value, LOWEST), token, None] for token, value in step.top.items()]
