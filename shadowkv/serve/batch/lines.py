"""Parses the lines of a batch file into requests, and skips requests that have been answered."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shadowkv.serve.batch.files import DIGEST, BatchFiles
from shadowkv.serve.bodies.body import parse_json

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""Endpoints that a line can request."""


class BadLine(Exception):
    """A line that is not a request."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.custom_id = code, message, custom_id


@dataclass(frozen=True)
class LineRequest:
    """A line to answer.

    Attributes:
        id: id of the record with its answer.
        offset, size: position and length of the line in the file, in bytes.
    """

    id: str
    custom_id: str
    url: str
    body: dict[str, Any]
    offset: int
    size: int


def digest(request: Any) -> str:
    """Id of a request's record; it does not depend on the order of keys or on spaces in the line."""
    text = json.dumps(request, sort_keys=True)
    return f"{DIGEST}{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


class BatchLines:
    """The lines of one run, which are read in order. The constructor creates the file ``BatchFiles.partial``. It raises
    what ``BatchFiles.begin`` raises.

    Args:
        files: the run's files.
        urls: endpoints that a line can request.
        limit: maximum length of a line in bytes; None sets no limit.

    Attributes:
        answered: custom_ids of requests that earlier runs have answered.
    """

    def __init__(self, files: BatchFiles, urls: Sequence[str] = URLS, limit: int | None = None) -> None:
        self._urls, self._limit = urls, limit
        self.answered = files.begin(_requests(files) if files.resume else {})
        self._seen: set[str] = set()

    def read(self, number: int, line: bytes, offset: int) -> LineRequest | dict[str, Any] | None:
        """Returns a line's request. Returns None if an earlier run has answered it, and an error record if the line is
        not a request."""
        try:
            request = self._parse(line, offset)
        except BadLine as bad:
            error = {"code": bad.code, "message": f"line {number}: {bad.message}"}
            name = f"batch_req_{uuid.uuid4().hex}"
            return {"id": name, "custom_id": bad.custom_id, "response": None, "error": error}
        return None if request.custom_id in self.answered else request

    def _parse(self, line: bytes, offset: int) -> LineRequest:
        """The request of a line; raises BadLine."""
        if self._limit is not None and len(line) > self._limit:
            raise BadLine("line_too_long", f"it has {len(line)} bytes; at most {self._limit} are allowed")
        try:
            request = parse_json(line)
            name = digest(request)
        except json.JSONDecodeError as error:
            raise BadLine("invalid_json", f"not valid JSON: {error}") from error
        if not isinstance(request, dict):
            raise BadLine("invalid_request", "not a JSON object")
        custom_id = request.get("custom_id")
        if not isinstance(custom_id, str):
            raise BadLine("invalid_request", "custom_id must be a string")
        if custom_id in self._seen:
            raise BadLine("duplicate_custom_id", f"custom_id {custom_id!r} was used before", custom_id)
        self._seen.add(custom_id)
        if request.get("method") != "POST":
            raise BadLine("invalid_method", "method must be POST", custom_id)
        if request.get("url") not in self._urls:
            raise BadLine("invalid_url", f"url must be one of {', '.join(self._urls)}", custom_id)
        if not isinstance(request.get("body"), dict):
            raise BadLine("invalid_request", "body must be a JSON object", custom_id)
        return LineRequest(name, custom_id, request["url"], request["body"], offset, len(line))


def _requests(files: BatchFiles) -> dict[str, str]:
    """Returns the digests of the file's requests; the keys are the custom_ids. If several requests have the same
    custom_id, the first one counts; the others are refused."""
    digests: dict[str, str] = {}
    with files.input.open("rb") as source:
        for line in source:
            with suppress(json.JSONDecodeError):
                request = parse_json(line)
                if isinstance(request, dict) and isinstance(request.get("custom_id"), str):
                    digests.setdefault(request["custom_id"], digest(request))
    return digests
