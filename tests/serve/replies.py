"""Reads the server's replies."""

from __future__ import annotations

import json
from typing import Any

import httpx


def events(response: httpx.Response) -> list[Any]:
    """Data of every event of a stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]
