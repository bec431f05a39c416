"""Routes of SGLang's and llama.cpp's own APIs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.bodies.body import Name
from shadowkv.serve.http.owners import current_tenant
from shadowkv.serve.http.replies import reply
from shadowkv.serve.http.routing import EVENT_STREAM, FOR_EVERY_BODY, FOR_EVERY_TEXT, Answer, BodyRoute, documented
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.native.llama_cpp import PATHS, LlamaCompletions, LlamaRequest
from shadowkv.serve.native.sglang import Generate, GenerateRequest
from shadowkv.serve.openai.chats import conversation_tokens
from shadowkv.serve.openai.endpoint import Responder, check_model
from shadowkv.serve.openai.messages import Conversation, Turns
from shadowkv.serve.text.tokenization import in_turn, tokenize_limit

if TYPE_CHECKING:
    from shadowkv.engine.process.client import EngineClient


class LlamaErrorDetail(Answer):
    """An error. ``type`` is llama.cpp's name for the kind of error, and ``code`` is the HTTP status."""

    message: str
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "unavailable_error",
        "exceed_context_size_error",
        "not_supported_error",
        "server_error",
    ]
    param: str | None
    code: int
    n_prompt_tokens: int = 0
    n_ctx: int = 0


class LlamaError(Answer):
    """Body of every response with a status of 400 or more, at llama.cpp's own paths."""

    error: LlamaErrorDetail


class Template(Answer):
    """Answer of ``/apply-template``."""

    prompt: str


class TemplateRequest(Conversation):
    """Body of ``/apply-template``: a conversation."""

    model: Name | None = None
    messages: Turns = Field(min_length=1)


def native_routes(engine: EngineClient, settings: ServerSettings, respond: Responder) -> APIRouter:
    """Returns SGLang's route ``/generate``, and llama.cpp's routes ``/completion``, ``/apply-template``, ``/props`` and
    ``/slots``."""
    router = APIRouter(route_class=BodyRoute)
    generate, complete = Generate(engine.tokenizer, settings), LlamaCompletions(engine.tokenizer, settings)
    of_sglang = documented(None, *FOR_EVERY_TEXT, text=EVENT_STREAM)
    of_llama = documented(None, *FOR_EVERY_TEXT, text=EVENT_STREAM, error=LlamaError)

    @router.post(Generate.url, **of_sglang)
    async def post_generate(body: GenerateRequest, request: Request) -> Response:
        return await respond(generate, body, request)

    @router.post(PATHS[1], **of_llama)
    @router.post(PATHS[0], **of_llama)
    async def post_completion(body: LlamaRequest, request: Request) -> Response:
        return await respond(complete, body, request)

    @router.post("/apply-template", **documented(Template, *FOR_EVERY_BODY, error=LlamaError))
    async def post_apply_template(body: TemplateRequest, request: Request) -> Response:
        check_model(body.model, respond.served_name)
        settings.check_trust(body.chat_template)

        def apply() -> Response:
            tokens = conversation_tokens(engine.tokenizer, body, tokenize_limit(engine.max_model_len))
            return JSONResponse({"prompt": engine.tokenizer.decode(tokens, skip_special_tokens=False)})

        return await reply(request, lambda: in_turn(current_tenant(), body.characters, apply))

    @router.get("/props", **documented(None, 401, 429, 503, error=LlamaError))
    async def get_props() -> dict[str, Any]:
        template = engine.tokenizer.chat_template or ""
        return {
            "default_generation_settings": {"n_ctx": engine.max_model_len, "params": dict(engine.sampling_defaults)},
            "total_slots": engine.max_num_seqs,
            "model_alias": respond.served_name,
            "model_path": engine.model_path,
            "chat_template": template,
            "modalities": {"vision": False, "audio": False},
        }

    @router.get("/slots", **documented(None, 401, 429, 501, 503, error=LlamaError))
    async def get_slots() -> list[dict[str, Any]]:
        """Lists one slot for each sequence that can run at once. Slots are not tied to requests: if n sequences run,
        the first n slots count as processing."""
        if not settings.slots:
            raise ApiError("this server was started with --no-slots", status=501)
        running = (await engine.stats()).running
        about = {"n_ctx": engine.max_model_len, "speculative": engine.drafts}
        return [{"id": slot, **about, "is_processing": slot < running} for slot in range(engine.max_num_seqs)]

    return router
