"""Routes of SGLang's and llama.cpp's own APIs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from shadowkv.engine.request import EngineDead
from shadowkv.serve.http.errors import as_api_error
from shadowkv.serve.http.routing import EVENT_STREAM, FOR_EVERY_TEXT, BodyRoute, responses
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.native.llama_cpp import LlamaCompletions, LlamaRequest
from shadowkv.serve.native.sglang import Generate, GenerateRequest
from shadowkv.serve.openai.endpoint import Responder

if TYPE_CHECKING:
    from shadowkv.engine.process.client import EngineClient


def native_routes(engine: EngineClient, settings: ServerSettings, respond: Responder) -> APIRouter:
    """``/generate``, ``/completion``, and what llama.cpp's clients ask about the server."""
    router = APIRouter(route_class=BodyRoute)
    generate, complete = Generate(engine.tokenizer, settings), LlamaCompletions(engine.tokenizer, settings)
    documented = responses(None, *FOR_EVERY_TEXT, text=EVENT_STREAM)

    @router.post(Generate.url, response_model=None, responses=documented)
    async def post_generate(body: GenerateRequest, request: Request) -> Response:
        return await respond(generate, body, request)

    @router.post(LlamaCompletions.url, response_model=None, responses=documented)
    async def post_completion(body: LlamaRequest, request: Request) -> Response:
        return await respond(complete, body, request)

    @router.get("/props", response_model=None, responses=responses(None, 401, 429, 503))
    async def get_props() -> dict[str, Any]:
        template = engine.tokenizer.chat_template or ""
        return {
            "default_generation_settings": {"n_ctx": engine.max_model_len, "params": dict(engine.sampling_defaults)},
            "total_slots": engine.max_num_seqs,
            "model_alias": respond.served_name,
            "model_path": engine.model_name,
            "chat_template": template,
            "modalities": {"vision": False, "audio": False},
        }

    @router.get("/slots", response_model=None, responses=responses(None, 401, 429, 503))
    async def get_slots() -> list[dict[str, Any]]:
        """As many as sequences run at once; which one has which request is nobody's concern, so the first ones are
        those at work."""
        try:
            running = (await engine.stats()).running
        except EngineDead as error:
            raise as_api_error(error) from error
        about = {"n_ctx": engine.max_model_len, "speculative": False}
        return [{"id": slot, **about, "is_processing": slot < running} for slot in range(engine.max_num_seqs)]

    return router
