"""``/v1/completions``: text in, text out."""

from __future__ import annotations

from typing import Any

from shadowkv.serve.api_error import ApiError
from shadowkv.serve.choices import Choices, selections_of
from shadowkv.serve.jobs import Piece
from shadowkv.serve.logprobs import completion_logprobs
from shadowkv.serve.protocol import CompletionRequest
from shadowkv.serve.tokenization import encode, too_long
from shadowkv.wording import counted


class Completions(Choices):
    """Text in, text out."""

    url = "/v1/completions"
    request_type = CompletionRequest
    id_prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def sizes(self, request: CompletionRequest) -> list[int]:
        return [len(prompt) for prompt in request.prompt]

    def prompts(self, request: CompletionRequest, limit: int) -> list[list[int]]:
        for prompt in request.prompt:
            if not isinstance(prompt, str) and len(prompt) > limit:
                reason = f"at most {counted(limit, 'token')} may come, but the prompt has {len(prompt)}"
                raise too_long(reason, "prompt")
        try:
            return [
                encode(self.tokenizer, prompt, limit, "prompt") if isinstance(prompt, str) else prompt.tolist()
                for prompt in request.prompt
            ]
        except ValueError as error:  # text that is not valid UTF-8
            raise ApiError(str(error), param="prompt") from error

    def echo(self, request: CompletionRequest, prompts: list[list[int]]) -> list[str] | None:
        if not request.echo:
            return None
        pairs = zip(request.prompt, prompts, strict=True)
        return [
            text if isinstance(text, str) else self.tokenizer.decode(ids, skip_special_tokens=False)
            for text, ids in pairs
        ]

    def choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": None
            if piece.logprobs is None
            else completion_logprobs(self.tokenizer, piece.logprobs, piece.offset),
            "finish_reason": piece.finish_reason,
            **selections_of(piece),
        }

    def delta(self, piece: Piece) -> list[dict[str, Any]]:
        return [self.choice(piece)]
