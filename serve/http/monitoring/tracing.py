"""A span per request, by OpenTelemetry's conventions for generative AI, without prompts.

The SDK (`pip install mergestep[otel]`) is imported only if an endpoint is set; its thread sends the
spans.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from typing import TYPE_CHECKING, Any

from serve import __version__
from serve.errors import ConfigError
from serve.http.monitoring.access_log import access_fields
from serve.kept import Kept

if TYPE_CHECKING:
    from serve.http.calls.context import Call

CLOSE_S = 0.5
POLL_S = 0.02
_SPAN_BYTES = 6 << 10  # of a span with our attributes, as measured
_PARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


def make_tracer(endpoint: str | None) -> RequestTracer | None:
    """Returns a tracer, or None without an endpoint. Raises ConfigError for a bad endpoint or a
    missing SDK."""
    if endpoint is None:
        return None
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"otlp_endpoint must be an http or https address, not {endpoint!r}")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(
            "otlp_endpoint needs OpenTelemetry: pip install 'mergestep[otel]'"
        ) from None
    url = endpoint.rstrip("/")
    exporter = OTLPSpanExporter(url if url.endswith("/v1/traces") else f"{url}/v1/traces")
    return RequestTracer(BatchSpanProcessor(exporter))


class RequestTracer:
    """Makes the spans. processor: a SpanProcessor, which receives ended spans."""

    def __init__(self, processor: Any) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = Resource.create({"service.name": "mergestep", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._processor = processor
        self._tracer = self._provider.get_tracer("mergestep", __version__)

    def kept(self) -> Kept:
        """Returns the size of the ended spans that wait to be sent. The SDK keeps at most 2,048 and
        drops the others; it does not tell their number, so that its queue is looked at."""
        batches = getattr(self._processor, "_batch_processor", None)
        count = len(getattr(batches, "_queue", ()))
        return Kept(count, count * _SPAN_BYTES)

    def answered(self, call: Call, status: int) -> None:
        """Ends the span of a call, which began at its arrival. Public routes have none."""
        from opentelemetry.trace import SpanKind, StatusCode

        route = call.route
        if route is None or route.is_public:
            return
        now_ns = time.time_ns()
        began_ns = now_ns - int((time.monotonic() - call.arrived_s) * 1e9)
        attributes = _attributes(call, status)
        operation = attributes.get("gen_ai.operation.name")
        model = attributes.get("gen_ai.request.model")
        span = self._tracer.start_span(
            f"{operation} {model}" if operation else f"{call.request.method} {route.path}",
            context=_parent(call.request.headers.get("traceparent")),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=began_ns,
        )
        if status >= 500 or call.error_code is not None:
            span.set_status(StatusCode.ERROR)
        span.end(now_ns)

    async def close(self) -> None:
        """Sends the remaining spans, for at most CLOSE_S."""
        # not to_thread: the end of the event loop waits for its threads
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        loop = asyncio.get_running_loop()
        due_s = loop.time() + CLOSE_S
        while closing.is_alive() and loop.time() < due_s:
            await asyncio.sleep(POLL_S)


def _attributes(call: Call, status: int) -> dict[str, Any]:
    fields = access_fields(call, status)
    attributes: dict[str, Any] = {
        "http.request.method": fields["method"],
        "http.route": fields["route"],
        "http.response.status_code": status,
        "mergestep.request.id": fields["id"],
    }
    if call.key is not None:
        attributes["enduser.id"] = call.key.name
    if call.error_code is not None:
        attributes["error.type"] = call.error_code
    operation = _OPERATIONS.get(fields["route"])
    if operation is not None:
        attributes["gen_ai.operation.name"] = operation
        attributes["gen_ai.provider.name"] = "mergestep"
        attributes["gen_ai.request.model"] = call.engine.model_name
    if "prompt_tokens" in fields:
        attributes["gen_ai.response.model"] = call.engine.model_name
        attributes["gen_ai.usage.input_tokens"] = fields["prompt_tokens"]
        attributes["gen_ai.usage.output_tokens"] = fields["completion_tokens"]
        reasons = [reason for m in call.policy.usage() for reason in m.finish_reasons]
        attributes["gen_ai.response.finish_reasons"] = reasons[:128]
    if "ttft" in fields:
        attributes["gen_ai.server.time_to_first_token"] = fields["ttft"]
    return attributes


def _parent(header: str | None) -> Any:
    """Returns the context of the caller's span from W3C's traceparent; None if it is absent or
    malformed."""
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    match = None if header is None else _PARENT.fullmatch(header)
    if match is None:
        return None
    trace, span, flags = (int(group, 16) for group in match.groups())
    if not trace or not span:
        return None
    context = SpanContext(trace, span, is_remote=True, trace_flags=TraceFlags(flags))
    return set_span_in_context(NonRecordingSpan(context))
