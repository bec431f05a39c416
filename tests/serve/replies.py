"""Reads the server's replies."""

from __future__ import annotations

import json
from typing import Any

import httpx


def named_events(response: httpx.Response) -> list[Any]:
    """Data of every event of a stream whose events have their types as names."""
    found = [event.split("\n") for event in response.text.split("\n\n") if event]
    data = [json.loads(line.removeprefix("data: ")) for _, line in found]
    assert [name.removeprefix("event: ") for name, _ in found] == [one["type"] for one in data]
    return data


def events(response: httpx.Response) -> list[Any]:
    """Data of every event of a stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]
