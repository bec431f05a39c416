"""Answers a file of requests in the OpenAI batch format: the server's own code without HTTP.

A line ``{"custom_id", "method": "POST", "url", "body"}`` becomes a line ``{"id", "custom_id", "response", "error"}``;
the order may change. Records are written as they complete, to a ``.partial`` file that is renamed at the end.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

from pydantic import ValidationError
from tqdm import tqdm

from shadowkv.serve.batch_files import BatchFiles
from shadowkv.serve.endpoints import ENDPOINTS
from shadowkv.serve.errors import ApiError, as_api_error, from_validation
from shadowkv.serve.jobs import answer, prepare

if TYPE_CHECKING:
    from shadowkv.engine.async_engine import AsyncEngine

SERVICE_UNAVAILABLE = 503


class BadLine(Exception):
    """A line that is no request."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.custom_id = code, message, custom_id


@dataclass
class BatchRun:
    """One pass over a file."""

    engine: AsyncEngine
    model: str
    files: BatchFiles
    done: int = 0
    failed: int = 0
    tokens: int = 0
    start: float = field(default_factory=monotonic)

    def __post_init__(self) -> None:
        self.endpoints = {url: endpoint(self.engine.tokenizer) for url, endpoint in ENDPOINTS.items()}
        self.seen: set[str] = set()

    async def run(self, concurrency: int) -> None:
        """Answers every line; raises ApiError if the engine dies."""
        with self.files.input.open("rb") as source:
            total = sum(1 for line in source if line.strip())
        with (
            self.files.input.open("rb") as source,
            self.files.partial.open("x", encoding="utf-8") as sink,
            tqdm(total=total, unit="request", file=sys.stderr) as bar,
        ):
            # One iterator for all workers: a file of long prompts is never in memory as a whole.
            lines = ((number, line) for number, line in enumerate(source, 1) if line.strip())
            workers = [asyncio.create_task(self._work(lines, sink, bar)) for _ in range(min(concurrency, total))]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
        self.files.partial.replace(self.files.output)

    def kept(self) -> str:
        """After a run that was cut short: how many answers there are, and where."""
        if not self.done:
            self.files.partial.unlink(missing_ok=True)
            return "no answers yet"
        return f"{self.done} answers are in {self.files.partial}"

    async def _work(self, lines: Iterator[tuple[int, bytes]], sink: TextIO, bar: tqdm[None]) -> None:
        for number, line in lines:
            record = await self._record(number, line)
            sink.write(json.dumps(record, ensure_ascii=False) + "\n")
            sink.flush()
            response = record["response"]
            self.done += 1
            if response is None or response["status_code"] != 200:
                self.failed += 1
            else:
                self.tokens += response["body"]["usage"]["completion_tokens"]
            bar.set_postfix_str(f"{self.tokens / (monotonic() - self.start):.1f} tokens/s", refresh=False)
            bar.update()

    async def _record(self, number: int, line: bytes) -> dict[str, Any]:
        record: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": None}
        try:
            request = self._parse(line)
        except BadLine as bad:
            error = {"code": bad.code, "message": f"line {number}: {bad.message}"}
            return {**record, "custom_id": bad.custom_id, "response": None, "error": error}
        try:
            status, body = 200, await self._answer(request)
        except Exception as failure:
            wrong = as_api_error(failure)
            if wrong.status == SERVICE_UNAVAILABLE:  # as would be every line from here on
                raise wrong from failure
            status, body = wrong.status, wrong.body()
        response = {"status_code": status, "request_id": body.get("id", record["id"]), "body": body}
        return {**record, "custom_id": request["custom_id"], "response": response, "error": None}

    def _parse(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadLine("invalid_json", f"not valid JSON: {error}") from error
        if not isinstance(request, dict):
            raise BadLine("invalid_request", "not a JSON object")
        custom_id = request.get("custom_id")
        if not isinstance(custom_id, str):
            raise BadLine("invalid_request", "custom_id must be a string")
        if custom_id in self.seen:
            raise BadLine("duplicate_custom_id", f"custom_id {custom_id!r} was used before", custom_id)
        self.seen.add(custom_id)
        if request.get("method") != "POST":
            raise BadLine("invalid_method", "method must be POST", custom_id)
        if request.get("url") not in tuple(self.endpoints):
            raise BadLine("invalid_url", f"url must be one of {', '.join(self.endpoints)}", custom_id)
        if not isinstance(request.get("body"), dict):
            raise BadLine("invalid_request", "body must be a JSON object", custom_id)
        return request

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        endpoint = self.endpoints[request["url"]]
        try:
            body = endpoint.request_type.model_validate(request["body"])
        except ValidationError as error:
            raise from_validation(error.errors()) from error
        if body.stream:
            raise ApiError("stream is not supported in a batch", param="stream")
        return await answer(await prepare(self.engine, endpoint, body, self.model))


def run_batch(engine: AsyncEngine, model: str, files: BatchFiles, concurrency: int) -> int:
    """Answers the file and says how it went; returns the exit code."""
    run = BatchRun(engine, model, files)
    try:
        asyncio.run(run.run(concurrency))
    except KeyboardInterrupt:
        print(f"interrupted: {run.kept()}", file=sys.stderr)
        return 130
    except ApiError as error:
        print(f"error: {error}; {run.kept()}", file=sys.stderr)
        return 1
    seconds = monotonic() - run.start
    print(f"{run.done} requests, {run.failed} failed, {run.tokens} tokens in {seconds:.1f} s -> {files.output}")
    return 0
