"""Routes of the OpenAI API and of vLLM: completions, chats, tokenization, and endpoints that are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import PrivateAttr, model_validator

from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.bodies.body import Body
from shadowkv.serve.http.owners import current_tenant
from shadowkv.serve.http.replies import reply
from shadowkv.serve.http.routing import (
    EVENT_STREAM,
    FOR_EVERY_BODY,
    FOR_EVERY_TEXT,
    BodyRoute,
    documented,
    read_request,
)
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.openai.answers import (
    ChatCompletion,
    Completion,
    Detokenized,
    InputTokens,
    Tokenized,
    TokenizerInfo,
)
from shadowkv.serve.openai.chats import conversation_tokens, count_tokens
from shadowkv.serve.openai.completions import ChatBatches, ChatBatchRequest, ChatCompletions, Completions
from shadowkv.serve.openai.endpoint import Responder, check_model
from shadowkv.serve.openai.logprobs import token_text
from shadowkv.serve.openai.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from shadowkv.serve.text.tokenization import check_tokens, encode, in_turn, tokenize_limit

if TYPE_CHECKING:
    from shadowkv.engine.process.client import EngineClient

UNSERVED = ("/v1/embeddings", "/v1/rerank", "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations")


class Invocation(Body):
    """Body of Amazon SageMaker's ``/invocations``. It is a chat if it has ``messages``, otherwise a completion. This
    class only finds out which; the body is then read again as a chat or a completion."""

    is_read_again = True

    _is_chat: bool = PrivateAttr(False)

    @property
    def is_chat(self) -> bool:
        """Whether the body is a chat."""
        return self._is_chat

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Invocation:
        self._is_chat |= "messages" in (self.model_extra or {})  # FastAPI validates the body a second time
        self.__pydantic_extra__ = {}
        return self


def choice_routes(engine: EngineClient, settings: ServerSettings, respond: Responder) -> APIRouter:
    """Returns the routes ``/v1/completions``, ``/v1/chat/completions``, its ``/batch`` and ``/input_tokens``, and
    ``/invocations``."""
    router = APIRouter(route_class=BodyRoute)
    completions, chats = Completions(engine.tokenizer, settings), ChatCompletions(engine.tokenizer, settings)
    chat_batches = ChatBatches(engine.tokenizer, settings)

    @router.post(Completions.url, **documented(Completion, *FOR_EVERY_TEXT, text=EVENT_STREAM))
    async def post_completions(body: CompletionRequest, request: Request) -> Response:
        return await respond(completions, body, request)

    @router.post(ChatCompletions.url, **documented(ChatCompletion, *FOR_EVERY_TEXT, text=EVENT_STREAM))
    async def post_chat_completions(body: ChatRequest, request: Request) -> Response:
        return await respond(chats, body, request)

    @router.post(ChatBatches.url, **documented(ChatCompletion, *FOR_EVERY_TEXT))
    async def post_chat_batch(body: ChatBatchRequest, request: Request) -> Response:
        return await respond(chat_batches, body, request)

    @router.post(f"{ChatCompletions.url}/input_tokens", **documented(InputTokens, *FOR_EVERY_BODY))
    async def post_input_tokens(body: ChatRequest, request: Request) -> Response:
        check_model(body.model, respond.served_name)
        settings.check_trust(body.chat_template)
        return await count_tokens(chats, body, tokenize_limit(engine.max_model_len), request)

    @router.post("/invocations", **documented(None, *FOR_EVERY_TEXT, text=EVENT_STREAM))
    async def post_invocations(body: Invocation, request: Request) -> Response:
        raw = await request.body()
        if body.is_chat:
            return await respond(chats, await read_request(request, raw, ChatRequest), request)
        return await respond(completions, await read_request(request, raw, CompletionRequest), request)

    return router


def token_routes(engine: EngineClient, served_name: str, settings: ServerSettings) -> APIRouter:
    """Returns the routes ``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, as in vLLM. With them, lm_eval needs
    no tokenizer of its own. Tokenization and the formatting of answers run in threads."""
    router, tokenizer = APIRouter(route_class=BodyRoute), engine.tokenizer

    def tokenize_content(body: TokenizeRequest, content: str) -> Response:
        """Answers llama.cpp's form of ``/tokenize``, which adds special tokens only on request."""
        limit = tokenize_limit(engine.max_model_len)
        tokens = encode(tokenizer, content, limit, "content", add_special_tokens=body.add_special)
        return JSONResponse({"tokens": shown(body, tokens)})

    def shown(body: TokenizeRequest, tokens: list[int]) -> list[Any]:
        """Returns the token ids. With ``with_pieces``, each id comes with the token's text, as in llama.cpp."""
        if not body.with_pieces:
            return tokens
        return [{"id": token, "piece": token_text(tokenizer, token)} for token in tokens]

    def tokenize(body: TokenizeRequest) -> Response:
        if body.content is not None:
            return tokenize_content(body, body.content)
        settings.check_trust(body.chat_template)
        special, text, limit = body.add_special_tokens, body.prompt, tokenize_limit(engine.max_model_len)
        if text is None:
            tokens = conversation_tokens(tokenizer, body, limit, body.parse_special, special)
        else:
            tokens = encode(tokenizer, text, limit, "prompt", add_special_tokens=special is not False)
        strings = tokenizer.spelling(tokens) if body.return_token_strs else None
        count = {"count": len(tokens), "max_model_len": engine.max_model_len}
        return JSONResponse({**count, "tokens": shown(body, tokens), "token_strs": strings})

    def detokenize(body: DetokenizeRequest) -> Response:
        check_tokens(tokenizer, body.tokens, "tokens")
        text = tokenizer.decode(body.tokens.tolist(), skip_special_tokens=False)
        return JSONResponse({"prompt": text} if body.model is not None else {"prompt": text, "content": text})

    @router.post("/tokenize", **documented(Tokenized, *FOR_EVERY_BODY))
    async def post_tokenize(body: TokenizeRequest, request: Request) -> Response:
        check_model(body.model, served_name)
        return await reply(request, lambda: in_turn(current_tenant(), body.size, lambda: tokenize(body)))

    @router.post("/detokenize", **documented(Detokenized, *FOR_EVERY_BODY))
    async def post_detokenize(body: DetokenizeRequest, request: Request) -> Response:
        check_model(body.model, served_name)
        return await reply(request, lambda: in_turn(current_tenant(), len(body.tokens), lambda: detokenize(body)))

    @router.get("/tokenizer_info", **documented(TokenizerInfo, 401, 429, 503))
    async def get_tokenizer_info() -> dict[str, Any]:
        template = {} if tokenizer.chat_template is None else {"chat_template": tokenizer.chat_template}
        about = {"vocab_size": tokenizer.vocab_size, "tokenizer_class": type(tokenizer).__name__}
        return {"eos_token": None, **tokenizer.special_tokens, **about, **template}

    return router


def unserved_routes() -> APIRouter:
    """Returns the routes for which other kinds of models would be needed. Each answers with an error, without reading
    the body."""
    router = APIRouter()

    async def refuse() -> Response:
        served = "/v1/chat/completions, /v1/completions, /v1/responses or /v1/messages"
        raise ApiError(f"this server only generates text: use {served}", code="not_served")

    about = documented(None, 400, 401, 413, 429, 503)
    del about["responses"][200]
    for url in UNSERVED:
        router.add_api_route(url, refuse, methods=["POST"], status_code=400, **about)
    return router
