"""Hostile and broken clients of a soak: bad and giant bodies, half requests, answers never read.

Each is over in seconds, whatever the server does. It is a fault if a server answers one of them as if it were a good
one.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from robustness.client import Lost, SoakClient

HOLD_SECONDS = 3.0
"""The longest that a connection is held without sending; half as long again without reading."""

RECEIVE_BUFFER = 4096
"""Bytes that the system buffers for a client that does not read."""

BAD_PARAMETERS: tuple[tuple[str, Any], ...] = (
    ("temperature", "hot"),
    ("max_tokens", -1),
    ("max_tokens", 10**9),
    ("n", 0),
    ("stop", 5),
    ("top_p", 2),
    ("logit_bias", {"x": 1}),
    ("logprobs", 1000),
    ("prompt", {}),
    ("grammar", "x"),
)


class HostileClients(SoakClient):
    """Their behaviours, one per method."""

    async def do_bad(self) -> None:
        good = json.dumps(self.body([1, 2, 3]))
        bodies: list[tuple[str | bytes, tuple[int, ...]]] = [
            (good[: self.random.randrange(len(good))], (400,)),
            (self.random.randbytes(self.random.randrange(200)), (400,)),
            ("[" * self.random.randrange(1, 10_000), (400,)),
            (json.dumps({**self.body([1]), "model": "no such model"}), (404,)),
            *((json.dumps({**self.body([1]), name: value}), (400,)) for name, value in BAD_PARAMETERS),
            (json.dumps(self.body([1] * (self.limit + self.random.randrange(1, 50)))), (400,)),
            (json.dumps(self.body([2**31])), (400,)),
        ]
        content, status = self.random.choice(bodies)
        path = self.random.choice(["/v1/completions", "/v1/chat/completions"])
        response = await self.client.post(path, content=content, headers={"Content-Type": "application/json"})
        error = response.json()["error"]
        if response.status_code not in (*status, 400) or set(error) != {"message", "type", "param", "code"}:
            raise Lost(f"{response.status_code} for {content[:80]!r}: {error}")

    async def do_giant_body(self) -> None:
        limit = int(self.args.max_body_mib * 2**20)
        too_long = self.random.random() < 0.5
        content = json.dumps(self.body([1], max_tokens=1)).encode().ljust(limit + too_long)
        headers = {"Content-Type": "application/json"}
        response = await self.client.post("/v1/completions", content=content, headers=headers)
        busy = response.status_code == 503 and "retry-after" in response.headers
        if response.status_code != (413 if too_long else 200) and not busy:
            raise Lost(f"{response.status_code} for a body of {len(content)} bytes: {response.text[:200]}")

    async def do_silent(self) -> None:
        await self.hold(b"")

    async def do_half_header(self) -> None:
        request = self.raw_request(self.body([1]))
        await self.hold(request[: self.random.randrange(1, request.index(b"\r\n\r\n"))])

    async def do_half_body(self) -> None:
        request = self.raw_request(self.body([1]))
        await self.hold(request[: self.random.randrange(request.index(b"\r\n\r\n") + 4, len(request))])

    async def do_slow_reader(self) -> None:
        """A long stream that is never read."""
        body = self.body(self.prompt(self.random.random(), 1), ignore_eos=True, stream=True)
        body["max_tokens"] = self.limit - len(body["prompt"])
        async with self.connection(self.raw_request(body)) as connection:
            await asyncio.sleep(self.random.uniform(HOLD_SECONDS / 2, 1.5 * HOLD_SECONDS))
            try:
                while await asyncio.wait_for(asyncio.get_running_loop().sock_recv(connection, 2**16), 0.1):
                    pass
            except ConnectionResetError:
                self.counts["slow readers cut off"] += 1
            except asyncio.TimeoutError:
                pass

    async def hold(self, request: bytes) -> None:
        """Sends part of a request and waits; if the server answers meanwhile, it must not be a good answer."""
        async with self.connection(request) as connection:
            receive = asyncio.get_running_loop().sock_recv(connection, 2**16)
            try:
                answer = await asyncio.wait_for(receive, self.random.uniform(0, HOLD_SECONDS))
            except (asyncio.TimeoutError, ConnectionResetError):
                return
        self.counts["half requests cut off"] += 1
        if answer and answer.split()[1] not in (b"408", b"503"):
            raise Lost(f"half a request got {answer[:200]!r}")

    def raw_request(self, body: dict[str, Any]) -> bytes:
        """A request for a completion, as raw bytes."""
        content = json.dumps(body).encode()
        return (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self.client.base_url.host}\r\n"
            f"Authorization: Bearer {self.args.api_key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        ).encode() + content

    @asynccontextmanager
    async def connection(self, request: bytes) -> AsyncIterator[socket.socket]:
        """A new connection that has sent the request, and reads nothing by itself."""
        loop, url = asyncio.get_running_loop(), self.client.base_url
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
            connection.setblocking(False)
            await loop.sock_connect(connection, (url.host, url.port))
            await loop.sock_sendall(connection, request)
            yield connection
