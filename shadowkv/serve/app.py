"""Builds the web application, with its middleware and the routes of all APIs, and serves it on a socket."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from shadowkv.engine.child_process import STOP_SECONDS
from shadowkv.serve.anthropic.routes import messages_routes
from shadowkv.serve.batch.file_routes import file_routes
from shadowkv.serve.batch.message_routes import message_batch_routes
from shadowkv.serve.batch.routes import batch_routes
from shadowkv.serve.batch.runner import BatchRunner
from shadowkv.serve.bodies.reader import BodyReader
from shadowkv.serve.http.counts import Counts
from shadowkv.serve.http.errors import handle_errors
from shadowkv.serve.http.metrics import Metrics
from shadowkv.serve.http.middleware import Guard, HeadAsGet, RequestLog, RootPath, Unprefixed
from shadowkv.serve.http.routing import Application
from shadowkv.serve.http.server import server_on
from shadowkv.serve.http.settings import LOCALHOST, ServerSettings
from shadowkv.serve.http.status_routes import status_routes
from shadowkv.serve.http.tracing import Tracing
from shadowkv.serve.native.routes import native_routes
from shadowkv.serve.openai.cache_routes import cache_routes
from shadowkv.serve.openai.endpoint import Responder
from shadowkv.serve.openai.routes import choice_routes, token_routes, unserved_routes
from shadowkv.serve.page.documents import DOCUMENT_SECONDS, MAX_DOCUMENT_BYTES
from shadowkv.serve.page.routes import PAGE_PATHS, page_assets, page_routes
from shadowkv.serve.responses.background import Background
from shadowkv.serve.responses.routes import responses_routes
from shadowkv.serve.storage.store import RecordStore
from shadowkv.serve.text.memory import give_back_large_blocks
from shadowkv.serve.text.tokenization import drop_long
from shadowkv.serve.workers import Workers

if TYPE_CHECKING:
    from shadowkv.engine.process.client import EngineClient
    from shadowkv.engine.process.launch import EngineProcess, ReplicaProcesses

LOCAL_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?"


def build_app(
    engine: EngineClient,
    served_name: str,
    settings: ServerSettings | None = None,
    compared: EngineClient | None = None,
    *,
    counts: Counts | None = None,
) -> FastAPI:
    """Builds the application.

    Args:
        served_name: the model's name in answers; ``settings`` has other names that requests can use.
        compared: a second engine of the same model, with another policy. Requests choose it by the model name
            ``{served_name}@{policy}``. None: there is one engine.
        counts: counts of open connections and requests in all processes; None if this is the only process.
    """
    settings = settings or ServerSettings()
    bodies = BodyReader(settings.max_body_bytes)
    store = RecordStore(None if settings.storage_dir is None else Path(settings.storage_dir), settings.storage_bytes)
    documents = BodyReader(MAX_DOCUMENT_BYTES, DOCUMENT_SECONDS)
    engines, compared_name = {served_name: engine}, None
    if compared is not None:
        compared_name = f"{served_name}@{compared.kv}"
        engines[compared_name] = compared
    tracing = None if settings.otlp_traces_endpoint is None else Tracing.to(settings.otlp_traces_endpoint)

    async def drop() -> None:
        """Refuses all bodies and long texts that are still being read or tokenized, or that wait for their turn."""
        bodies.close()
        documents.close()
        drop_long()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for served in engines.values():
            served.connect()
        async with batches.running() if app.state.counts.is_first else nullcontext():
            yield
        await background.close()
        await asyncio.to_thread(store.close)
        await drop()
        for served in engines.values():
            served.disconnect()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    app = Application(title="shadowkv", docs_url="/docs", redoc_url=None, lifespan=lifespan)
    app.state.bodies, app.state.documents, app.state.store, app.state.drop = bodies, documents, store, drop
    add_middleware(app, settings, tracing, counts)
    app.include_router(token_routes(engine, served_name, settings))
    shared = app.state.counts.processes > 1
    metrics = Metrics(engine, served_name, shared, settings.metrics_prefix)
    batches = BatchRunner(store, engine, served_name, settings, metrics)
    app.state.settings, app.state.metrics = settings, metrics  # the connections read them here
    app.include_router(cache_routes(engine, served_name, settings, metrics))
    respond = Responder(engines, served_name, settings, metrics)
    for routes in (choice_routes, messages_routes, native_routes):
        app.include_router(routes(engine, settings, respond))
    background = Background(store)
    app.include_router(responses_routes(engine.tokenizer, settings, respond, store, background))
    for kept_routes in (file_routes, batch_routes, message_batch_routes):
        app.include_router(kept_routes(settings, store))
    if settings.ui:
        app.include_router(page_assets())
        app.include_router(page_routes(engine, metrics, documents, compared_name))
    app.include_router(unserved_routes())
    names = dict.fromkeys(settings.served_model_name[1:], engine)
    app.include_router(status_routes(engine, {served_name: engine, **names, **engines}, metrics, settings.metrics))
    handle_errors(app)
    return app


def add_middleware(
    app: FastAPI, settings: ServerSettings, tracing: Tracing | None = None, counts: Counts | None = None
) -> None:
    """Adds all middleware, including the log and the guard; ``counts`` as for ``build_app``."""
    app.state.counts = counts or Counts(len(settings.api_key))
    app.add_middleware(
        Guard, settings=settings, counts=app.state.counts, keyless_paths=PAGE_PATHS if settings.ui else frozenset()
    )
    app.add_middleware(HeadAsGet)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_origin_regex=LOCAL_PAGES if LOCALHOST in settings.allowed_origins else None,
            allow_credentials=settings.allow_credentials,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(RequestLog, log=not settings.disable_uvicorn_access_log, tracing=tracing)
    app.add_middleware(Unprefixed)
    if settings.root_path:
        app.add_middleware(RootPath, root=settings.root_path)


def ready_app(engines: Sequence[EngineClient], served_name: str, settings: ServerSettings, counts: Counts) -> FastAPI:
    """Builds the application for a process that only serves it, and tunes the process's memory and garbage collection
    for that. The application serves ``engines[0]``. If there is a second engine, the chat page compares the answers
    of both."""
    app = build_app(engines[0], served_name, settings, *engines[1:], counts=counts)
    give_back_large_blocks()
    gc.collect()
    gc.freeze()  # without this, a full collection visits the libraries' objects and stops every stream for 0.15 s
    return app


def serve(
    process: EngineProcess | ReplicaProcesses, served_name: str, listener: socket.socket, workers: Workers
) -> bool:
    """Serves the engines of ``process`` on a bound socket, which the processes of ``workers`` serve, too. Returns
    whether the last engine process has ended by itself. After a signal, shuts everything down and raises the signal's
    exception, if the command has not been started with the signal ignored."""

    was_well = False

    async def stop() -> None:
        nonlocal was_well
        was_well = not server.has_failed  # from here on the engine ends because it is stopped
        await asyncio.to_thread(workers.join)
        await asyncio.to_thread(process.stop, STOP_SECONDS)

    app = ready_app(process.clients, served_name, workers.settings, workers.counts)
    server = server_on(listener, app, [stop, app.state.drop], workers.drain)
    process.when_it_ends(lambda reason: server.fail())
    server.run(sockets=[listener])
    return server.has_failed and not was_well
