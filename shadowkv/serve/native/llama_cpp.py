"""llama.cpp's ``/completion``. An answer has the text, the reason why the text ended, the settings and the timings."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from itertools import chain, groupby, islice
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field, PrivateAttr, WithJsonSchema

from shadowkv.engine.outputs import TokenLogprobs
from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.bodies.body import Name, refusal
from shadowkv.serve.bodies.limits import MAX_BIASED_CHARS, MAX_LOGIT_BIASES
from shadowkv.serve.http.replies import Events
from shadowkv.serve.native.converted import NativeCompletion, NativeRequest
from shadowkv.serve.openai.completions import Completions
from shadowkv.serve.openai.jobs import Job, Piece, progress_timings
from shadowkv.serve.openai.logprobs import LOWEST, token_text
from shadowkv.serve.openai.output_schema import Rules
from shadowkv.serve.openai.protocol import CompletionRequest, GenerationRequest, Sampling, Stops, TextRequest, Tokens
from shadowkv.serve.text.tokenization import check_prompt, encode

NAMES = MappingProxyType({"max_tokens": "n_predict", "logprobs": "n_probs"})

PATHS = ("/completion", "/completions")
"""Paths of this endpoint."""

SETTINGS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "ignore_eos")

MAX_FIELDS = 64
"""Maximum number of ``response_fields``."""


PROMPT: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {}},
        {"type": "object", "properties": {"prompt_string": {"type": "string"}}, "required": ["prompt_string"]},
    ]
}


class LlamaRequest(NativeRequest, Sampling):
    """Body of ``/completion``."""

    names = NAMES

    prompt: Annotated[Any, WithJsonSchema(PROMPT)]
    n_predict: int = -1
    n_probs: int = 0
    repeat_penalty: float | None = None
    logit_bias: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "array", "items": {}}]})] = None
    return_tokens: bool = False
    timings_per_token: bool = False
    response_fields: list[Name] = Field([], max_length=MAX_FIELDS, fail_fast=True)
    stop: Stops = Field([])
    grammar: Rules | None = None
    json_schema: Rules | dict[str, Any] | None = None
    return_progress: bool = False
    _text_biases: list[tuple[str, float]] = PrivateAttr([])

    @property
    def text_biases(self) -> list[tuple[str, float]]:
        """Those entries of ``logit_bias`` that name tokens by a text: pairs of a text and a bias."""
        return self._text_biases

    def as_generation(self) -> dict[str, Any]:
        if self.n_predict < -1:
            raise refusal("n_predict", f"n_predict must be at least -1, not {self.n_predict}")
        biases, self._text_biases = _biases(self.logit_bias)
        prompt, pieces = _prompts(self.prompt)
        return {
            **self.shared,
            "seed": None if self.seed == -1 else self.seed,  # -1 asks for a random seed
            "prompt": prompt,
            "pieces": pieces,
            "max_tokens": None if self.n_predict == -1 else self.n_predict,
            **({} if self.repeat_penalty is None else {"repetition_penalty": self.repeat_penalty}),
            "logit_bias": biases,
            "stop": self.stop,
            "grammar": self.grammar,
            "json_schema": self.json_schema,
            "return_progress": self.return_progress,
            "logprobs": self.n_probs or None,
            "return_token_ids": True,
            "stream": self.stream,
        }


def _prompts(value: Any) -> tuple[Any, tuple[int, ...]]:
    """Splits prompts into pieces. Returns the pieces of all prompts, each a text or token ids, and the number of pieces
    of each prompt. ``value`` is one prompt or a list of prompts. A prompt is a text, an object with a text, a list of
    token ids, or a list of texts and token ids."""
    if not isinstance(value, list | dict):
        return value, (1,)
    prompts = value if isinstance(value, list) and not _is_sequence(value) else [value]
    pieces = [_pieces(prompt) for prompt in prompts]
    return [*chain.from_iterable(pieces)], tuple(map(len, pieces))


def _is_sequence(items: list[Any]) -> bool:
    """Whether a list is one prompt: token ids, or token ids and texts."""
    kinds = set(map(type, items))
    return kinds <= {int} or kinds == {int, str}


def _pieces(prompt: Any) -> list[Any]:
    if isinstance(prompt, dict):
        if prompt.get("multimodal_data"):
            raise refusal("prompt", "multimodal_data is not supported: this server reads text")
        if not isinstance(text := prompt.get("prompt_string"), str):
            raise refusal("prompt", "a prompt that is an object needs a prompt_string, a text")
        return [text]
    if not isinstance(prompt, list) or str not in set(map(type, prompt)) or not _is_sequence(prompt):
        return [prompt]
    runs = groupby(prompt, type)
    return [piece for kind, run in runs for piece in (run if kind is str else [[*run]])]


def _biases(value: Any) -> tuple[Any, list[tuple[str, float]]]:
    """Splits llama.cpp's ``logit_bias``. Returns the entries with token ids, as in OpenAI's ``logit_bias``, and the
    entries with texts. An entry is a pair in a list, or a key of an object and its value. It consists of a token id or
    a text, and of a number or false. false means minus infinity, and becomes -100."""
    if value is None:
        return None, []
    if not isinstance(value, list | dict):
        raise refusal(
            "logit_bias", "logit_bias must be a list of pairs [token id or text, number or false], or an object"
        )
    if len(value) > MAX_LOGIT_BIASES:
        raise refusal("logit_bias", f"{len(value)} tokens are too many; at most {MAX_LOGIT_BIASES} are allowed")
    biases: dict[str, Any] = {}
    texts: list[tuple[str, float]] = []
    for pair in value.items() if isinstance(value, dict) else value:
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and type(pair[0]) in (int, str)):
            raise refusal(
                "logit_bias", "each entry of logit_bias must be a pair: a token id or a text, then a number or false"
            )
        token, bias = pair[0], -100 if pair[1] is False else pair[1]
        if isinstance(token, int) or (token.isascii() and token.isdigit()):
            biases[str(token)] = bias
        elif type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise refusal("logit_bias", "logit_bias: a text needs a number between -100 and 100, or false")
        else:
            texts.append((token, bias))
    if (characters := sum(len(text) for text, _ in texts)) > MAX_BIASED_CHARS:
        reason = f"{characters} characters of texts are too many; at most {MAX_BIASED_CHARS} are allowed"
        raise refusal("logit_bias", f"logit_bias: {reason}")
    return biases, texts


class LlamaCompletions(Completions):
    """The endpoint ``/completion``."""

    url = PATHS[0]
    request_type = LlamaRequest
    id_prefix = "cmpl-"
    names = NAMES

    def request(self, body: TextRequest) -> GenerationRequest:
        assert isinstance(body, LlamaRequest)
        biases = dict(body.generation.logit_bias)
        for text, bias in body.text_biases:
            try:
                tokens = self.tokenizer.encode(text, add_special_tokens=False)
            except ValueError as error:  # text that is not valid UTF-8
                raise ApiError(str(error), param="logit_bias") from error
            biases |= dict.fromkeys(tokens, bias)
            if len(biases) > MAX_LOGIT_BIASES:
                reason = f"logit_bias names more than {MAX_LOGIT_BIASES} tokens, the maximum"
                raise ApiError(reason, param="logit_bias")
        return body.generation.model_copy(update={"logit_bias": biases}) if body.text_biases else body.generation

    def sizes(self, request: CompletionRequest) -> list[int]:
        return [sum(map(len, pieces)) for pieces in _joined(request)]

    def prompts(self, request: CompletionRequest, limit: int) -> list[list[int]]:
        prompts = [self._tokens(pieces, limit) for pieces in _joined(request)]
        for prompt in prompts:
            check_prompt(self.tokenizer, prompt, limit, "prompt")
        return prompts

    def _tokens(self, pieces: Sequence[str | Tokens], limit: int) -> list[int]:
        """Returns the token ids of a prompt's pieces. Special tokens are added only if the first piece is a text."""
        tokens: list[int] = []
        for piece in pieces:
            if isinstance(piece, str):
                tokens += encode(self.tokenizer, piece, limit, "prompt", add_special_tokens=not tokens)
            else:
                tokens += piece.tolist()
        return tokens

    async def answer(self, job: Job) -> Any:
        """Returns an answer, or a list of answers if there are several prompts."""
        answers = [self._selected(job, self._whole(job, piece)) for piece in await job.joined_pieces()]
        return answers if len(answers) > 1 else answers[0]

    def stream(self, job: Job) -> Events:
        return Events(self._events(job), partial(ApiError.body, path=self.url), end=b"")

    async def _events(self, job: Job) -> AsyncGenerator[dict[str, Any], None]:
        """Yields events with pieces of text, and for each prompt a last event with everything but the text."""
        body = _body(job)
        async with aclosing(job.pieces()) as pieces:
            async for piece in pieces:
                if piece.prompt_progress is not None:
                    head = {"index": piece.index, "content": "", "tokens": [], "stop": False}
                    more = {"timings": progress_timings(piece.prompt_progress)} if body.timings_per_token else {}
                    yield {**head, "prompt_progress": piece.prompt_progress, **more}
                    continue
                for part in _parts(piece):
                    output = job.last_outputs[piece.index]
                    head = {"index": piece.index, "content": part.text, "tokens": list(part.token_ids), "stop": False}
                    counts = {"tokens_predicted": output.completion_tokens, "tokens_evaluated": output.prompt_tokens}
                    more = {"timings": job.timings_of(piece.index)} if body.timings_per_token else {}
                    yield {**head, "id_slot": -1, **counts, **more, **self._probabilities(part)}
                if piece.finish_reason is not None:
                    end = Piece(piece.index, finish_reason=piece.finish_reason, stop_string=piece.stop_string)
                    yield self._selected(job, self._whole(job, end))

    def _whole(self, job: Job, piece: Piece) -> dict[str, Any]:
        output, choice = job.last_outputs[piece.index], job.choices[piece.index]
        kind = "limit" if piece.finish_reason == "length" else "word" if piece.stop_string else "eos"
        settings = {name: getattr(choice.params, name) for name in SETTINGS}
        biases: list[dict[str, Any]] = [
            {"token": token, "bias": bias} for token, bias in choice.params.logit_bias.items()
        ]
        if choice.params.ignore_eos:  # the bias is minus infinity, which JSON cannot express
            biases += [{"token": token, "bias": None} for token in sorted(self.tokenizer.eos_token_ids)]
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
            "timings": job.timings_of(piece.index),
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
        """Returns the answer with only the requested ``response_fields``, or with all fields if none are requested. In
        ``response_fields``, ``a/b`` is the name of the field b in the object a."""
        fields: Sequence[str] = _body(job).response_fields
        if not fields:
            return answer
        found = {name: _field(answer, name.split("/")) for name in fields}
        return {name: value for name, value in found.items() if value is not None}


def _joined(request: CompletionRequest) -> Iterator[list[str | Tokens]]:
    """Returns an iterator over the prompts, which yields the list of each prompt's pieces."""
    assert isinstance(request, NativeCompletion)
    pieces = iter(request.prompt)
    return ([*islice(pieces, count)] for count in request.pieces)


def _parts(piece: Piece) -> list[Piece]:
    """Splits a piece into the parts that are streamed as events. With log-probabilities there is one part per token,
    and the last part has all of the text. Without them, a piece with text is one part."""
    if not piece.logprobs:
        return [piece] if piece.text else []
    parts = [Piece(piece.index, token_ids=[step.token_id], logprobs=[step]) for step in piece.logprobs]
    parts[-1].text = piece.text
    return parts


def _field(answer: Mapping[str, Any], path: Sequence[str]) -> Any:
    value: Any = answer
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _body(job: Job) -> LlamaRequest:
    assert isinstance(job.body, LlamaRequest)
    return job.body
