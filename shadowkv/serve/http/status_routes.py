"""Routes about the server itself: its models, health, load, version and metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field

from shadowkv import __version__
from shadowkv.engine.request import EngineState
from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.http.metrics import Metrics
from shadowkv.serve.http.routing import Answer, documented

if TYPE_CHECKING:
    from shadowkv.engine.process.client import EngineClient


class ServedModel(Answer):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(Answer):
    """Answer of ``/v1/models``."""

    object: Literal["list"]
    data: list[ServedModel]


class Health(Answer):
    """Answer of ``/health``, with 503 unless an engine is ok. If there are several, it has the status of each."""

    status: EngineState
    engines: list[EngineState] = Field(default_factory=list)


class Load(Answer):
    """Answer of ``/load``: the number of running and waiting requests."""

    server_load: int


class Version(Answer):
    """Answer of ``/version``."""

    version: str


def status_routes(
    engine: EngineClient, engines: Mapping[str, EngineClient], metrics: Metrics, has_metrics: bool
) -> APIRouter:
    """The routes.

    Args:
        has_metrics: whether ``/metrics`` is enabled.
        engine: the engine whose health is the server's.
        engines: all engines; keys are the model names that clients use.
    """
    router = APIRouter()
    about = {"object": "model", "created": int(time.time()), "owned_by": "shadowkv"}
    models = {
        name: {"id": name, **about, "root": served.model_name, "parent": None, "max_model_len": served.max_model_len}
        for name, served in engines.items()
    }

    @router.get("/v1/models", **documented(ModelList, 401, 429, 503))
    async def get_models() -> dict[str, Any]:
        return {"object": "list", "data": [*models.values()]}

    @router.get("/v1/models/{name:path}", **documented(ServedModel, 401, 404, 429, 503))
    async def get_model(name: str) -> dict[str, Any]:
        if name not in models:
            raise ApiError(f"the model {name!r} does not exist", status=404, param="model", code="model_not_found")
        return models[name]

    @router.get("/ping", response_model=None, responses={200: {"model": Health}, 503: {"model": Health}})
    @router.post("/ping", response_model=None, responses={200: {"model": Health}, 503: {"model": Health}})
    @router.get("/health", response_model=None, responses={200: {"model": Health}, 503: {"model": Health}})
    async def get_health() -> Response:
        answer: dict[str, Any] = {"status": engine.state}
        if len(engine.engines) > 1:
            answer["engines"] = [one.state for one in engine.engines]
        return JSONResponse(answer, status_code=200 if engine.state == "ok" else 503)

    @router.get("/load", **documented(Load, 503))
    async def get_load() -> dict[str, int]:
        stats = await engine.stats()
        return {"server_load": stats.running + stats.waiting}

    @router.get("/version", **documented(Version, 503))
    async def get_version() -> dict[str, str]:
        return {"version": __version__}

    @router.get("/metrics", response_class=Response, **documented(None, 501, 503, text="text/plain"))
    async def get_metrics() -> Response:
        if not has_metrics:
            raise ApiError("this server was started with --no-metrics", status=501)
        started = {"Process-Start-Time-Unix": str(about["created"])}  # as in llama.cpp
        return Response(await metrics.text(), media_type=CONTENT_TYPE_LATEST, headers=started)

    return router
