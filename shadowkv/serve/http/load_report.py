"""The server's load as a response header, for load balancers: Open Request Cost Aggregation (ORCA)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fastapi import Request

if TYPE_CHECKING:
    from shadowkv.engine.process.client import EngineClient

ASKED, REPORTED = "endpoint-load-metrics-format", "endpoint-load-metrics"
"""The request's and the response's header, as in vLLM."""


async def load_report(request: Request, engine: EngineClient) -> dict[str, str]:
    """Returns the load header if the request asks for it in the format ``TEXT`` or ``JSON``, and no header otherwise.
    Raises EngineDead."""
    kind = request.headers.get(ASKED, "").upper()
    if kind not in ("TEXT", "JSON"):
        return {}
    stats = await engine.stats()
    figures = {"num_requests_running": stats.running, "num_requests_waiting": stats.waiting}
    if kind == "JSON":
        return {REPORTED: f"JSON {json.dumps({'named_metrics': figures})}"}
    return {REPORTED: "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in figures.items())}
