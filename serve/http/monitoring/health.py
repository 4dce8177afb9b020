"""/health, /ready and /metrics."""

from __future__ import annotations

import orjson
from aiohttp import web

from serve.errors import GROUP_LOST
from serve.http.calls.context import ApiContext, Call, Route
from serve.http.calls.continuation import JOURNAL_HEADER
from serve.http.edge.errors import (
    common_headers,
    engine_stuck,
    json_response,
    no_memory,
    rank_lost,
)
from serve.http.monitoring.exposition import CONTENT_TYPE, Exposition
from serve.http.openai.answer_schemas import STATUS_ANSWER
from serve.http.schema.describe import Operation

LIVE = ("/health", "/health/live", "/ping")
QUEUE_HEADER = "x-mergestep-queue-seconds"  # for a hop that chooses among servers
LOAD_HEADER = "x-mergestep-load"  # for one that parts prompts from decoding
READY = ("/ready", "/health/ready")


def health_routes(context: ApiContext) -> list[Route]:
    exposition = Exposition(context)

    async def health(call: Call) -> web.Response:
        stall = context.engine.stall_reason()
        if stall is not None:
            raise engine_stuck(stall)
        return json_response({"status": "ok"}, call.request_id)

    async def ready(call: Call) -> web.Response:
        context.check_ready()
        if not context.engine.has_memory:
            if context.engine.config.num_ranks > 1:
                raise rank_lost(GROUP_LOST)
            raise no_memory("memory nodes are lost, and there is no other K/V memory")
        response = json_response({"status": "ready"}, call.request_id)
        if JOURNAL_HEADER in call.request.headers:
            response.headers[QUEUE_HEADER] = f"{context.engine.forecast(1, 0).queue_s:.4f}"
            load = context.engine.load_report()
            if load is not None:
                response.headers[LOAD_HEADER] = orjson.dumps(load).decode()
        return response

    async def metrics(call: Call) -> web.Response:
        context.check_ready()
        return web.Response(
            body=await exposition.read(),
            headers={"Content-Type": CONTENT_TYPE, **common_headers(call.request_id)},
        )

    alive = Operation("Whether the process is alive", STATUS_ANSWER)
    serving = Operation("Whether requests are answered", STATUS_ANSWER)
    scrape = Operation("Metrics for Prometheus", answer_type="text/plain")
    routes = [
        *(Route(path, {"GET": health}, is_public=True, describe={"GET": alive}) for path in LIVE),
        *(Route(path, {"GET": ready}, is_public=True, describe={"GET": serving}) for path in READY),
    ]
    if context.settings.metrics_port is None:  # else metrics_listener.py has it
        routes.append(Route("/metrics", {"GET": metrics}, describe={"GET": scrape}))
    return routes
