"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, as vLLM has them; lm_eval needs no other tokenizer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

from shadowkv.serve.api_error import ApiError
from shadowkv.serve.body_route import BodyRoute
from shadowkv.serve.jobs import check_model
from shadowkv.serve.protocol import DetokenizeRequest, TokenizeRequest

if TYPE_CHECKING:
    from shadowkv.engine.async_engine import AsyncEngine


def token_routes(engine: AsyncEngine, served_name: str) -> APIRouter:
    """The routes; the work is done in threads, as long prompts take seconds."""
    router, tokenizer = APIRouter(route_class=BodyRoute), engine.tokenizer

    def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        special, text = body.add_special_tokens, body.prompt
        try:
            if text is None:
                messages = [message.for_template() for message in body.messages or ()]
                text = tokenizer.apply_chat_template(messages, add_generation_prompt=body.add_generation_prompt)
                special = bool(special)
            tokens = tokenizer.encode(text, add_special_tokens=special is not False)
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
        return await asyncio.to_thread(detokenize, body.tokens.tolist())

    @router.get("/tokenizer_info")
    async def get_tokenizer_info() -> dict[str, Any]:
        template = {} if tokenizer.chat_template is None else {"chat_template": tokenizer.chat_template}
        return {"eos_token": None, **tokenizer.special_tokens, "vocab_size": tokenizer.vocab_size, **template}

    return router
