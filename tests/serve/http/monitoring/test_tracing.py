"""Attributes and parents of request spans, and their export."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import uvloop
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from serve.errors import ConfigError
from serve.http import HttpServer, HttpSettings
from serve.http.monitoring.tracing import RequestTracer, make_tracer
from tests.support.http.api_keys import ALICE
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.raw_requests import BODY, CHAT, RAW_BODY, request
from tests.support.http.running_server import Served, run_with_server

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


def spans_of(*lines: str, body: bytes = RAW_BODY, **options: Any) -> list[ReadableSpan]:
    """Returns the span of one request."""
    exporter = InMemorySpanExporter()

    async def check(served: Served) -> None:
        served.server.app._tracer = RequestTracer(SimpleSpanProcessor(exporter))
        await served.raw(request(body, *lines, **options))

    run_with_server(FakeEngine(), check, api_keys=(f"alice:{ALICE}",))
    return list(exporter.get_finished_spans())


def test_the_attributes_of_a_span() -> None:
    (span,) = spans_of(f"x-api-key: {ALICE}")
    assert span.name == "chat fake"
    assert span.parent is None
    assert span.start_time is not None and span.end_time is not None
    assert 0 < span.end_time - span.start_time < 5e9
    attributes = dict(span.attributes or {})
    assert str(attributes.pop("mergestep.request.id")).startswith("req_")
    assert 0 < float(str(attributes.pop("gen_ai.server.time_to_first_token"))) < 5
    assert attributes == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "enduser.id": "alice",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "mergestep",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 11,
        "gen_ai.response.finish_reasons": ("stop",),
    }
    assert span.resource.attributes["service.name"] == "mergestep"


def test_an_error() -> None:
    (span,) = spans_of(f"x-api-key: {ALICE}", body=b"{")
    attributes = dict(span.attributes or {})
    assert attributes["error.type"] == "invalid_json"
    assert attributes["http.response.status_code"] == 400
    assert not span.status.is_ok


def test_public_and_unknown_routes_have_no_span() -> None:
    for first in ("GET /health HTTP/1.1", "GET /nowhere HTTP/1.1"):
        assert spans_of(f"x-api-key: {ALICE}", body=b"", first=first) == []


def test_the_parent_is_the_callers_span() -> None:
    (span,) = spans_of(f"x-api-key: {ALICE}", f"traceparent: {TRACEPARENT}")
    assert span.parent is not None and span.context is not None
    assert f"{span.parent.span_id:016x}" == PARENT
    assert f"{span.context.trace_id:032x}" == TRACE


@pytest.mark.parametrize(
    "value",
    [
        "",
        "x",
        TRACEPARENT.upper(),
        TRACEPARENT + "-00",
        TRACEPARENT[:-1],
        "01" + TRACEPARENT[2:],
        TRACEPARENT.replace(TRACE, "0" * 32),
        TRACEPARENT.replace(PARENT, "0" * 16),
        "00-" + "a" * 5000,
    ],
)
def test_an_invalid_parent_is_ignored(value: str) -> None:
    (span,) = spans_of(f"x-api-key: {ALICE}", f"traceparent: {value}")
    assert span.parent is None


def test_no_span_under_an_unsampled_parent() -> None:
    assert spans_of(f"x-api-key: {ALICE}", f"traceparent: {TRACEPARENT[:-2]}00") == []


def test_spans_reach_a_collector() -> None:
    """Spans are sent over HTTP by OpenTelemetry's protocol before the server stops."""
    received: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()

        async def check(served: Served) -> None:
            assert (await served.post(CHAT, {**BODY, "user": "CANARY7f3a"}))[0] == 200

        url = f"http://127.0.0.1:{collector.server_port}"
        run_with_server(FakeEngine(), check, otlp_endpoint=url)
        collector.shutdown()
        thread.join()
    (data,) = received
    assert b"CANARY7f3a" not in data
    message = ExportTraceServiceRequest.FromString(data)
    assert message.resource_spans[0].scope_spans[0].spans[0].name == "chat fake"


@pytest.mark.timing
def test_a_missing_collector_delays_no_request() -> None:
    async def check(served: Served) -> None:
        for _ in range(3):
            assert (await served.post(CHAT, BODY))[0] == 200

    began_s = time.monotonic()
    run_with_server(FakeEngine(), check, otlp_endpoint="http://127.0.0.1:9")
    assert time.monotonic() - began_s < 3


def test_without_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match=r"pip install 'mergestep\[otel\]'"):
        make_tracer("http://127.0.0.1:4318")
    with pytest.raises(ConfigError, match="otlp_endpoint must be"):
        make_tracer("localhost:4318")


@pytest.mark.process
def test_opentelemetry_is_not_imported_without_tracing() -> None:
    code = (
        "import sys, serve.http.app; from serve.http.monitoring.tracing import make_tracer;"
        "assert make_tracer(None) is None;"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )

    async def run() -> int:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
        return await process.wait()

    assert uvloop.run(run()) == 0
    server = HttpServer(FakeEngine(), HttpSettings())  # type: ignore[arg-type]
    assert server.app._tracer is None
