"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, as in vLLM; lm_eval needs no other tokenizer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from shadowkv.serve.answers import Detokenized, Tokenized, TokenizerInfo
from shadowkv.serve.api_error import ApiError
from shadowkv.serve.endpoint import check_model
from shadowkv.serve.messages import template_input
from shadowkv.serve.protocol import DetokenizeRequest, TokenizeRequest, Tokens
from shadowkv.serve.routing import FOR_EVERY_BODY, BodyRoute, responses
from shadowkv.serve.tokenization import check_length, encode, in_turn, tokenize_limit

if TYPE_CHECKING:
    from shadowkv.engine.async_engine import AsyncEngine


def token_routes(engine: AsyncEngine, served_name: str) -> APIRouter:
    """The routes; their work, including the formatting of answers, is done in threads."""
    router, tokenizer = APIRouter(route_class=BodyRoute), engine.tokenizer

    def tokenize(body: TokenizeRequest) -> Response:
        param = "prompt" if body.prompt is not None else "messages"
        special, text, limit = body.add_special_tokens, body.prompt, tokenize_limit(engine.max_model_len)
        try:
            if text is None:
                turns, variables = template_input(body, tokenizer.chat_template)
                tokens = tokenizer.encode_chat(
                    turns,
                    body.add_generation_prompt,
                    parse_special=bool(body.parse_special),
                    add_special_tokens=bool(special),
                    check=partial(check_length, tokenizer, limit, param),
                    **variables,
                )
            else:
                tokens = encode(tokenizer, text, limit, param, add_special_tokens=special is not False)
        except ValueError as error:
            raise ApiError(str(error), param=param) from error
        strings = None
        if body.return_token_strs:
            strings = [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
        count = {"count": len(tokens), "max_model_len": engine.max_model_len}
        return JSONResponse({**count, "tokens": tokens, "token_strs": strings})

    def detokenize(tokens: Tokens) -> Response:
        vocab = tokenizer.vocab_size
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < vocab:
                raise ApiError(f"token id {token} is not in this model's vocabulary of {vocab}", param="tokens")
        return JSONResponse({"prompt": tokenizer.decode(tokens.tolist(), skip_special_tokens=False)})

    @router.post("/tokenize", response_model=None, responses=responses(Tokenized, *FOR_EVERY_BODY))
    async def post_tokenize(body: TokenizeRequest) -> Response:
        check_model(body.model, served_name)
        return await in_turn(body.size, lambda: tokenize(body))

    @router.post("/detokenize", response_model=None, responses=responses(Detokenized, *FOR_EVERY_BODY))
    async def post_detokenize(body: DetokenizeRequest) -> Response:
        check_model(body.model, served_name)
        return await in_turn(len(body.tokens), lambda: detokenize(body.tokens))

    @router.get("/tokenizer_info", response_model=None, responses=responses(TokenizerInfo, 401, 429, 503))
    async def get_tokenizer_info() -> dict[str, Any]:
        template = {} if tokenizer.chat_template is None else {"chat_template": tokenizer.chat_template}
        return {"eos_token": None, **tokenizer.special_tokens, "vocab_size": tokenizer.vocab_size, **template}

    return router
