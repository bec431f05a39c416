"""Routes of the OpenAI API and of vLLM for other kinds of models: each is refused clearly."""

from __future__ import annotations

from fastapi import APIRouter, Response

from shadowkv.serve.api_error import ApiError
from shadowkv.serve.routing import responses

UNSERVED = ("/v1/embeddings", "/v1/rerank", "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations")


def unserved_routes() -> APIRouter:
    """The routes; posted bodies are not read."""
    router = APIRouter()

    async def refuse() -> Response:
        served = "/v1/chat/completions, /v1/completions, /v1/responses or /v1/messages"
        raise ApiError(f"this server generates text and nothing else: ask {served}", code="not_served")

    for url in UNSERVED:
        documented = {status: one for status, one in responses(None, 400, 401, 413, 429, 503).items() if status != 200}
        router.add_api_route(url, refuse, methods=["POST"], status_code=400, response_model=None, responses=documented)
    return router
