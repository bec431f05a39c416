"""An OpenAI-compatible completions server that answers with the last word of the prompt, and keeps the requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def stub_server(max_model_len: int, usage: bool = True) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Base URL and the bodies of the requests so far; with ``usage`` every answer counts as 3 tokens."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({"object": "list", "data": [{"id": "stub", "object": "model", "max_model_len": max_model_len}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body)
            choice = {"index": 0, "text": f" {body['prompt'].split()[-1]}", "finish_reason": "stop"}
            reply = {"id": "1", "object": "text_completion", "model": "stub", "created": 0, "choices": [choice]}
            if usage:
                counts = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
                reply["usage"] = counts
            self.reply(reply)

        def reply(self, value: dict[str, Any]) -> None:
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
