"""llama.cpp's ``/completion``: a text and how it came about, its settings and how long it took."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Any

from pydantic import Field

from shadowkv.engine.outputs import TokenLogprobs
from shadowkv.serve.bodies.body import Name, refusal
from shadowkv.serve.bodies.limits import MAX_LOGIT_BIASES
from shadowkv.serve.http.replies import Events
from shadowkv.serve.native.converted import NativeCompletions, NativeRequest, seconds_of
from shadowkv.serve.openai.jobs import Job, Piece
from shadowkv.serve.openai.logprobs import LOWEST, token_text

NAMES = MappingProxyType({"max_tokens": "n_predict", "logprobs": "n_probs"})

SAMPLING = (
    ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos", "cache_prompt")
    + ("presence_penalty", "frequency_penalty")
    + ("grammar", "json_schema", "return_progress")
)
"""Parameters that a completion has by the same name, and is checked as."""

SETTINGS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "ignore_eos")

MAX_FIELDS = 64
"""Most ``response_fields``."""


class LlamaRequest(NativeRequest):
    """Body of ``/completion``."""

    names = NAMES

    prompt: Any
    n_predict: int = -1
    n_probs: int = 0
    repeat_penalty: float | None = None
    logit_bias: Any = None
    return_tokens: bool = False
    timings_per_token: bool = False
    response_fields: list[Name] = Field([], max_length=MAX_FIELDS, fail_fast=True)
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    seed: Any = None
    stop: Any = None
    ignore_eos: Any = None
    cache_prompt: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    grammar: Any = None
    json_schema: Any = None
    return_progress: Any = None

    def as_completion(self) -> dict[str, Any]:
        if self.n_predict < -1:
            raise refusal("n_predict", f"n_predict must be at least -1, not {self.n_predict}")
        seed = None if self.seed == -1 else self.seed  # -1 is a drawn one
        return {
            **{name: getattr(self, name) for name in SAMPLING},
            "seed": seed,
            "prompt": _prompts(self.prompt),
            "max_tokens": None if self.n_predict == -1 else self.n_predict,
            "repetition_penalty": self.repeat_penalty,
            "logit_bias": _biases(self.logit_bias),
            "logprobs": self.n_probs or None,
            "return_token_ids": True,
        }


def _prompts(value: Any) -> Any:
    """A prompt or a list of prompts, each of which may be an object that has a text."""
    if isinstance(value, dict):
        if value.get("multimodal_data"):
            raise refusal("prompt", "multimodal_data is not supported: this server reads text")
        return value.get("prompt_string")
    if isinstance(value, list) and not all(isinstance(item, int) for item in value):
        return [_prompts(item) if isinstance(item, dict) else item for item in value]
    return value


def _biases(value: Any) -> Any:
    """llama.cpp's list of pairs as OpenAI's object; false is minus infinity, for which -100 stands there."""
    if not isinstance(value, list):
        return value
    if len(value) > MAX_LOGIT_BIASES:
        raise refusal("logit_bias", f"{len(value)} token ids are too many; at most {MAX_LOGIT_BIASES} are allowed")
    biases: dict[str, Any] = {}
    for pair in value:
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int)):
            raise refusal("logit_bias", "logit_bias must be pairs of a token id and a number, or false")
        biases[str(pair[0])] = -100 if pair[1] is False else pair[1]
    return biases


class LlamaCompletions(NativeCompletions):
    """The endpoint."""

    url = "/completion"
    request_type = LlamaRequest
    id_prefix = "cmpl-"
    names = NAMES

    async def answer(self, job: Job) -> Any:
        """An answer, or a list of them where there are several prompts."""
        answers = [self._selected(job, self._whole(job, piece)) for piece in await job.joined_pieces()]
        return answers if len(answers) > 1 else answers[0]

    def stream(self, job: Job) -> Events:
        return Events(self._events(job), end=b"")

    async def _events(self, job: Job) -> AsyncGenerator[dict[str, Any], None]:
        """Pieces of text, and for each prompt a last event that has everything but the text."""
        body = _body(job)
        async with aclosing(job.pieces()) as pieces:
            async for piece in pieces:
                if piece.prompt_progress is not None:
                    head = {"index": piece.index, "content": "", "tokens": [], "stop": False}
                    yield {**head, "prompt_progress": piece.prompt_progress}
                    continue
                if piece.text or piece.logprobs:
                    output = job.last_outputs[piece.index]
                    part = {"index": piece.index, "content": piece.text, "tokens": list(piece.token_ids)}
                    counts = {"tokens_predicted": output.completion_tokens, "tokens_evaluated": output.prompt_tokens}
                    more = {"timings": timings(job, piece.index)} if body.timings_per_token else {}
                    yield {**part, "stop": False, "id_slot": -1, **counts, **more, **self._probabilities(piece)}
                if piece.finish_reason is not None:
                    end = Piece(piece.index, finish_reason=piece.finish_reason, stop_string=piece.stop_string)
                    yield self._selected(job, self._whole(job, end))

    def _whole(self, job: Job, piece: Piece) -> dict[str, Any]:
        output, choice = job.last_outputs[piece.index], job.choices[piece.index]
        kind = "limit" if piece.finish_reason == "length" else "word" if piece.stop_string else "eos"
        settings = {name: getattr(choice.params, name) for name in SETTINGS}
        biases = [{"token": token, "bias": bias} for token, bias in choice.params.logit_bias.items()]
        return {
            "index": piece.index,
            "content": piece.text,
            "tokens": list(piece.token_ids) if _body(job).return_tokens else [],
            "id_slot": -1,
            "stop": True,
            "model": job.model,
            "tokens_predicted": output.completion_tokens,
            "tokens_evaluated": output.prompt_tokens,
            "tokens_cached": output.prompt_tokens + output.completion_tokens - 1,
            "generation_settings": {
                "n_predict": choice.params.max_tokens,
                "seed": choice.params.seed,
                **settings,
                "repeat_penalty": choice.params.repetition_penalty,
                "stop": list(choice.params.stop),
                "logit_bias": biases,
                "n_probs": choice.params.logprobs or 0,
                "stream": _body(job).stream,
            },
            "prompt": self.tokenizer.decode(choice.prompt_token_ids, skip_special_tokens=False),
            "has_new_line": "\n" in piece.text,
            "truncated": False,
            "stop_type": kind,
            "stopping_word": piece.stop_string or "",
            "timings": timings(job, piece.index),
            **self._probabilities(piece),
        }

    def _probabilities(self, piece: Piece) -> dict[str, Any]:
        if not piece.logprobs:
            return {}
        return {"completion_probabilities": [self._scored(step) for step in piece.logprobs]}

    def _scored(self, step: TokenLogprobs) -> dict[str, Any]:
        top = [self._token(token, value) for token, value in step.top.items()]
        return {**self._token(step.token_id, step.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = token_text(self.tokenizer, token)
        return {"id": token, "token": text, "logprob": max(logprob, LOWEST), "bytes": list(text.encode())}

    def _selected(self, job: Job, answer: dict[str, Any]) -> dict[str, Any]:
        """An answer with ``response_fields`` alone, if there are some: ``a/b`` is the field b of a."""
        fields: Sequence[str] = _body(job).response_fields
        if not fields:
            return answer
        found = {name: _field(answer, name.split("/")) for name in fields}
        return {name: value for name, value in found.items() if value is not None}


def timings(job: Job, index: int) -> dict[str, float]:
    """How long a choice's prompt and its tokens took so far, in milliseconds, by llama.cpp's names."""
    output = job.last_outputs[index]
    read, written = output.prompt_tokens - output.cached_tokens, output.completion_tokens
    prompt, answer = seconds_of(job, index)
    return {
        "cache_n": output.cached_tokens,
        "prompt_n": read,
        **_rate("prompt", read, prompt),
        "predicted_n": written,
        **_rate("predicted", max(0, written - 1), answer),  # the first one is the prompt's
    }


def _rate(name: str, steps: int, seconds: float) -> dict[str, float]:
    milliseconds = 1000 * max(0.0, seconds)
    return {
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / steps if steps else 0.0,
        f"{name}_per_second": 1000 * steps / milliseconds if milliseconds > 0 else 0.0,
    }


def _field(answer: Mapping[str, Any], path: Sequence[str]) -> Any:
    value: Any = answer
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _body(job: Job) -> LlamaRequest:
    assert isinstance(job.body, LlamaRequest)
    return job.body
