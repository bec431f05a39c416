"""A route whose body is read by the application's ``BodyReader``, and reaches FastAPI as a parsed request."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, cast

from fastapi import Request, Response
from fastapi.routing import APIRoute

from shadowkv.serve.body import Body
from shadowkv.serve.body_reader import BodyReader
from shadowkv.serve.errors import BodyRefused, as_api_error


class _Request(Request):
    model: type[Body]

    async def body(self) -> bytes:  # a bytearray works as well
        # Grown as it arrives: joining the pieces of 32 MiB at the end would block everything for a while.
        if not hasattr(self, "_body"):
            whole = bytearray()
            async for piece in self.stream():
                whole += piece
            self._body = cast("bytes", whole)
        return self._body

    async def json(self) -> Any:
        reader: BodyReader = self.app.state.bodies
        raw = await self.body()
        try:
            return await reader.read(raw, self.model)
        except Exception as error:  # FastAPI would make a 400 of any but BodyRefused, even of our own errors
            raise BodyRefused(as_api_error(error)) from error


class BodyRoute(APIRoute):
    """A route; its body's type, if it takes one, is a ``Body``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            request = _Request(request.scope, request.receive)
            if self.body_field is not None:
                request.model = cast("type[Body]", self.body_field.field_info.annotation)
            return await handler(request)

        return handle
