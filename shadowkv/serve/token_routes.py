"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, as vLLM has them; lm_eval needs no other tokenizer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from pydantic import model_validator

from shadowkv.serve.errors import ApiError
from shadowkv.serve.jobs import check_model
from shadowkv.serve.protocol import Body, Message, TokenIds, refusal
from shadowkv.serve.strict_json import StrictJsonRoute

if TYPE_CHECKING:
    from shadowkv.engine.async_engine import AsyncEngine


class TokenizeRequest(Body):
    """Body of ``/tokenize``: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    parse_special: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (not self.messages):
            raise refusal("prompt", "pass either prompt or messages")
        if self.parse_special is not None and self.prompt is not None:
            raise refusal("parse_special", "parse_special is for messages; leave it out, a prompt's are always parsed")
        return self


class DetokenizeRequest(Body):
    """Body of ``/detokenize``."""

    model: str | None = None
    tokens: TokenIds


def token_routes(engine: AsyncEngine, served_name: str) -> APIRouter:
    """The routes; the work is done in threads, as long prompts take seconds."""
    router, tokenizer = APIRouter(route_class=StrictJsonRoute), engine.tokenizer

    def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        special = body.add_special_tokens
        try:
            if body.prompt is None:
                tokens = tokenizer.encode_chat(
                    [message.for_template() for message in body.messages or ()],
                    body.add_generation_prompt,
                    parse_special=bool(body.parse_special),
                    add_special_tokens=bool(special),
                )
            else:
                tokens = tokenizer.encode(body.prompt, add_special_tokens=special is not False)
        except ValueError as error:
            raise ApiError(str(error), param="prompt" if body.prompt is not None else "messages") from error
        strings = None
        if body.return_token_strs:
            strings = [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
        return {
            "count": len(tokens),
            "max_model_len": engine.max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }

    def detokenize(tokens: list[int]) -> dict[str, Any]:
        vocab = tokenizer.vocab_size
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < vocab:
                raise ApiError(f"token id {token} is not in this model's vocabulary of {vocab}", param="tokens")
        return {"prompt": tokenizer.decode(tokens, skip_special_tokens=False)}

    @router.post("/tokenize")
    async def post_tokenize(body: TokenizeRequest) -> dict[str, Any]:
        check_model(body.model, served_name)
        return await asyncio.to_thread(tokenize, body)

    @router.post("/detokenize")
    async def post_detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        check_model(body.model, served_name)
        return await asyncio.to_thread(detokenize, body.tokens)

    @router.get("/tokenizer_info")
    async def get_tokenizer_info() -> dict[str, Any]:
        template = {} if tokenizer.chat_template is None else {"chat_template": tokenizer.chat_template}
        return {"eos_token": None, **tokenizer.special_tokens, "vocab_size": tokenizer.vocab_size, **template}

    return router
