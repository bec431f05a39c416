"""ASGI middleware, from the outside in: path prefixes, the request id and log line, HEAD requests, and the guard. The
guard checks the host, the API key, the key's number of requests, and the size of the body."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.http.counts import Counts
from shadowkv.serve.http.errors import BodyTooLarge, error_response, too_large
from shadowkv.serve.http.owners import (
    PROMPT_OWNER,
    TENANT,
    digest,
    set_owner,
    set_prompt_owner,
    set_tenant,
    tenant_of_address,
)
from shadowkv.serve.http.request_record import CLIENT_GONE, INTERNAL, SERVER_STOPPING, RequestRecord, set_current_record
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.http.tracing import Tracing
from shadowkv.wording import counted

logger = logging.getLogger("shadowkv.serve.request_log")  # the name that the log shows

MAX_FIELD_CHARS = 200
"""Maximum length of log fields that a client influences: its address behind a proxy, the method and the path."""

UNPREFIXED = re.compile(r"/(chat/completions|models|responses)(/.*)?")
"""Paths of the OpenAI API without their ``/v1``. ``/completions`` is not among them: it is llama.cpp's own endpoint."""

OPEN_PATHS = frozenset(("/health", "/ping", "/load", "/version", "/metrics"))
"""Paths of probes and monitoring, which need no key."""

STATS_PATH = "/page/stats"
"""Path that the chat page polls every second. Its requests are neither counted nor logged."""

MAX_DIGITS = 18
"""Maximum number of digits of a Content-Length, so that it can be parsed as a number."""


class RequestLog:
    """ASGI middleware that adds an ``X-Request-Id`` to every answer, logs every request at its end, and counts requests
    by status.

    Args:
        app: the application that answers.
        log: whether requests are logged.
        tracing: sends the spans of requests. None: no spans are sent.
    """

    def __init__(self, app: ASGIApp, log: bool, tracing: Tracing | None) -> None:
        self._app, self._log, self._tracing = app, log, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        record = RequestRecord.of(scope)
        set_current_record(record)
        begun = complete = gone = False

        async def heard() -> Message:
            nonlocal gone
            message = await receive()
            gone = gone or message["type"] == "http.disconnect"
            return message

        async def noted(message: Message) -> None:
            nonlocal begun, complete
            if message["type"] == "http.response.start":
                begun, record.status = True, message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", record.id.encode())]
                message = {**message, "headers": headers}
            elif message["type"] == "http.response.body" and not message.get("more_body"):
                complete = True
            await send(message)

        try:
            await self._app(scope, heard, noted)
        except asyncio.CancelledError:  # the server stops and its time for running requests is over
            record.cut = SERVER_STOPPING
            raise
        finally:
            if gone and not complete:
                record.cut = CLIENT_GONE
            elif begun and not complete:  # if the answer has not begun, outer handlers send an error
                record.cut = record.cut or INTERNAL
            # Probes and the chat page send a request every few seconds: successful ones are neither counted nor logged.
            if not (record.status == 200 and scope["path"] in OPEN_PATHS | {STATS_PATH}):
                scope["app"].state.metrics.answered(record.status)
                if self._log:
                    logger.info("%s", _line(scope, record))
            if self._tracing is not None:
                self._tracing.add(scope, record)


def _line(scope: Scope, record: RequestRecord) -> str:
    """The request's log line: fields without names, then ``name=value`` fields. Fields contain no blanks, so that a
    client cannot forge a field."""
    client = "-" if scope.get("client") is None else "{}:{}".format(*scope["client"])
    path = scope.get("raw_path", b"").decode("latin-1")  # percent-encoded, without the query
    fields = [_field(client), _field(scope["method"]), _field(path), str(record.status), f"id={record.id}"]
    if record.generation is not None:
        usage = record.generation.usage()
        fields += [
            f"prompt_tokens={usage['prompt_tokens']}",
            f"cached_tokens={usage['prompt_tokens_details']['cached_tokens']}",
            f"completion_tokens={usage['completion_tokens']}",
        ]
        if (first := record.time_to_first_token) is not None:
            fields.append(f"ttft={first:.3f}s")
    fields.append(f"duration={record.duration:.3f}s")
    return " ".join([*fields, *(() if record.cut is None else (f"cut={record.cut}",))])


def _field(text: str) -> str:
    return re.sub(r"[^!-~]", "?", text)[:MAX_FIELD_CHARS]


class RootPath:
    """ASGI middleware that removes ``--root-path`` from the beginning of a path, unless a proxy has already done so.
    The application adds the root path to the links that it makes."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app, self._root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            scope = {**scope, "root_path": self._root}
            if path.startswith(f"{self._root}/"):
                scope["path"] = path.removeprefix(self._root)
        await self._app(scope, receive, send)


class Unprefixed:
    """ASGI middleware that also serves some paths without their ``/v1``, for clients that expect llama.cpp or whose
    base URL lacks the ``/v1``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and UNPREFIXED.fullmatch(scope["path"]):
            scope = {**scope, "path": f"/v1{scope['path']}"}
        await self._app(scope, receive, send)


class HeadAsGet:
    """ASGI middleware that answers HEAD requests for all paths that support GET. FastAPI's routes do not answer them.
    The answer has the status and headers of a GET, and no body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            return await self._app(scope, receive, send)

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, without_body)


class Guard:
    """ASGI middleware that refuses requests with a wrong host or API key, too many requests of one key, and bodies that
    are too large.

    Args:
        app: the application to guard.
        settings: the keys and the limits.
        counts: counts of running requests.
        keyless_paths: paths that need no key, besides ``OPEN_PATHS``.
    """

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, counts: Counts, keyless_paths: frozenset[str] = frozenset()
    ) -> None:
        self._app, self._limit = app, settings.max_body_bytes
        self._keyless_paths = OPEN_PATHS | keyless_paths
        self._hosts = (
            frozenset() if "*" in settings.allowed_hosts else frozenset(map(str.lower, settings.allowed_hosts))
        )
        self._keys = [key.encode() for key in settings.api_key]
        self._keeps_keys_apart = settings.keeps_keys_apart
        self._digests = [digest(key) for key in self._keys]
        self._limit_per_key, self._counts = settings.max_concurrent_requests_per_key, counts
        self._too_large = f"the body is longer than the limit of {settings.max_body_mib:g} MiB"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers, path = dict(scope["headers"]), scope["path"]
        named = headers.get(b"host")  # browsers, which this check is against, always send this header
        if self._hosts and named is not None and (host := _host(named)) not in self._hosts:
            hosts = ", ".join(sorted(self._hosts))
            error = ApiError(f"this server is {hosts}, not {host!r} (--allowed-hosts)", status=403, code="unknown_host")
            return await error_response(error, path)(scope, receive, send)
        if not self._keys or path in self._keyless_paths:
            set_prompt_owner(scope.get(PROMPT_OWNER))
            set_tenant(scope.get(TENANT) or tenant_of_address(scope))
            return await self._unless_too_large(scope, receive, send)
        # Anthropic's clients send x-api-key.
        given, bare = headers.get(b"authorization", b""), headers.get(b"x-api-key", b"")
        key = _matching_key(given, bare, self._keys)
        if key is None:
            wrong = "the API key is wrong"
            text = wrong if given or bare else "this server needs the header Authorization: Bearer <API key>"
            error = ApiError(text, status=401, code="invalid_api_key")
            return await JSONResponse(error.body(path), 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
        set_owner(scope, self._digests[key])
        set_tenant(self._digests[key])
        if self._keeps_keys_apart:
            set_prompt_owner(self._digests[key])
        if path == STATS_PATH:
            return await self._unless_too_large(scope, receive, send)
        if not self._counts.begin(key, self._limit_per_key):
            limit = counted(self._limit_per_key, "request")
            text = f"{limit} with this API key can run at once (--max-concurrent-requests-per-key)"
            error = ApiError(f"{text}; try again later", status=429, code="rate_limit_exceeded")
            return await error_response(error, path)(scope, receive, send)
        try:
            await self._unless_too_large(scope, receive, send)
        finally:
            self._counts.end(key)

    async def _unless_too_large(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or len(length) > MAX_DIGITS or int(length) > self._limit:
            return await too_large(self._too_large, scope["path"])(scope, receive, send)
        await self._app(scope, self._limited(receive), send)

    def _limited(self, receive: Receive) -> Receive:
        left = self._limit

        async def limited() -> Message:
            nonlocal left
            message = await receive()
            if message["type"] == "http.request":
                size, before = len(message.get("body", b"")), left
                left -= size
                if left < 0 <= before:  # raises only once: the rest of the body is discarded
                    raise BodyTooLarge(413, self._too_large)
            return message

        return limited


def _host(header: bytes) -> str:
    """The lower-case host in a Host header, without its port; the header itself if it cannot be parsed."""
    text = header.decode("latin-1")
    try:
        return urlsplit(f"//{text}").hostname or text
    except ValueError:
        return text


def _matching_key(credentials: bytes, bare: bytes, keys: Sequence[bytes]) -> int | None:
    """Returns the index of the key in ``keys`` that a request has; None if no key matches. ``credentials`` is the value
    of the Authorization header, whose scheme is case-insensitive (RFC 9110, 11.1). ``bare`` is the value of the
    x-api-key header."""
    scheme, _, given = credentials.partition(b" ")
    given = given.lstrip(b" ") if scheme.lower() == b"bearer" else b""
    # Every key is compared, in a time that depends only on its length. So the time does not help to guess a key.
    matches = [n for n, key in enumerate(keys) if hmac.compare_digest(given, key) | hmac.compare_digest(bare, key)]
    return matches[0] if matches else None
