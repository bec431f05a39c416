"""A client of an application without a socket."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from shadowkv.serve.app import build_app
from shadowkv.serve.http.settings import ServerSettings


class AppClient:
    """Sends requests to the application of an engine, one after another. A context, which ends what the application has
    started.

    Args:
        compared: further engines, as for ``build_app``.
        raises: whether a failure of the application is raised here; else it is answered.
    """

    def __init__(
        self,
        engine: Any,
        settings: ServerSettings | None = None,
        *compared: Any,
        model: str = "fake",
        raises: bool = True,
    ) -> None:
        self.app, self._raises = build_app(engine, model, settings, *compared), raises

    def __call__(self, method: str, url: str, key: str | None = None, **options: Any) -> httpx.Response:
        """The answer to a request, with an API key or without."""

        async def run() -> httpx.Response:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=self._raises)
            async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
                return await client.request(method, url, **options)

        return asyncio.run(run())

    def post(self, url: str, **body: Any) -> httpx.Response:
        """The answer to a body that is given as keywords."""
        return self("POST", url, json=body)

    def close(self) -> None:
        for part in (self.app.state.bodies, self.app.state.documents, self.app.state.store):
            part.close()

    def __enter__(self) -> AppClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def answers(engine: Any, settings: ServerSettings, *requests: tuple[str, str, dict[str, Any]]) -> list[httpx.Response]:
    """The answers of an application to requests: each a method, a URL and options of httpx."""
    with AppClient(engine, settings) as client:
        return [client(method, url, **options) for method, url, options in requests]
