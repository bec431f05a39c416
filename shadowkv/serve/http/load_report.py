"""How loaded the server is, in a header of an answer: Open Request Cost Aggregation (ORCA), for load balancers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fastapi import Request

if TYPE_CHECKING:
    from shadowkv.engine.process.client import EngineClient

ASKED, REPORTED = "endpoint-load-metrics-format", "endpoint-load-metrics"
"""Headers of the request and of the answer, by vLLM's names."""


async def load_report(request: Request, engine: EngineClient) -> dict[str, str]:
    """The header that a request asks for in the format ``TEXT`` or ``JSON``; none otherwise. Raises EngineDead."""
    kind = request.headers.get(ASKED, "").upper()
    if kind not in ("TEXT", "JSON"):
        return {}
    stats = await engine.stats()
    figures = {"num_requests_running": stats.running, "num_requests_waiting": stats.waiting}
    if kind == "JSON":
        return {REPORTED: f"JSON {json.dumps({'named_metrics': figures})}"}
    return {REPORTED: "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in figures.items())}
