"""OpenTelemetry spans of requests (``--otlp-traces-endpoint``), with vLLM's names and attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from shadowkv.serve.http.request_record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

SPAN_NAME = "llm_request"


class Tracing:
    """Sends a span for every request that generated something, in batches, on a separate thread.

    A ``traceparent`` header makes the span part of the client's trace (https://www.w3.org/TR/trace-context/).

    Args:
        exporter: the exporter that spans go to.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(resource=Resource.create({"service.name": "shadowkv"}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer, self._propagator = self._provider.get_tracer("shadowkv"), TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str) -> Tracing:
        """Tracing to the URL of a collector, by OTLP over HTTP."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(OTLPSpanExporter(endpoint=endpoint))

    def add(self, scope: Scope, record: RequestRecord) -> None:
        """Adds the span of a request that has ended, if anything was generated for it."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        if record.generation is None:
            return
        usage, params = record.generation.usage(), record.generation.choices[0].params
        attributes: dict[str, Any] = {
            "gen_ai.request.id": record.id,
            "gen_ai.response.model": record.generation.model,
            "gen_ai.request.n": len(record.generation.choices),
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
            "gen_ai.usage.completion_tokens": usage["completion_tokens"],
            "gen_ai.latency.time_in_queue": record.time_in_queue,
            "gen_ai.latency.time_to_first_token": record.time_to_first_token,
            "gen_ai.latency.e2e": record.duration,
            "http.response.status_code": record.status,
        }
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes={name: value for name, value in attributes.items() if value is not None},
            start_time=record.began_ns,
        )
        if record.status >= 500 or record.cut is not None:
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    def close(self) -> None:
        """Sends the remaining spans."""
        self._provider.shutdown()
