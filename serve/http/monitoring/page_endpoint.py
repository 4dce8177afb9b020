"""/: the page and its files, and /live for its live view."""

from __future__ import annotations

from aiohttp import hdrs, web

from serve.http.calls.answer_head import event_stream
from serve.http.calls.context import ApiContext, Call, Handler, Route
from serve.http.edge.errors import common_headers
from serve.http.monitoring.live import LiveFeed
from serve.http.monitoring.page_files import PageFile, read_page
from serve.http.schema.describe import Operation

EVENTS_TYPE = "text/event-stream; charset=utf-8"


def page_routes(context: ApiContext) -> list[Route]:
    feed = LiveFeed(context)
    context.kept["live_view"] = feed.kept

    async def live(call: Call) -> web.StreamResponse:
        context.check_ready()
        if call.request.method == "HEAD":
            headers = {hdrs.CONTENT_TYPE: EVENTS_TYPE, **common_headers(call.request_id)}
            return web.Response(headers=headers)
        return await feed.serve(call.request, event_stream(context, call))

    files = [
        Route(path, {"GET": _sender(file)}, is_public=True, describe={"GET": _described(file)})
        for path, file in read_page().items()
    ]
    stream = Operation(
        "Snapshots of the engine's work, without end", answer_type="text/event-stream"
    )
    return [*files, Route("/live", {"GET": live}, is_endless=True, describe={"GET": stream})]


def _described(file: PageFile) -> Operation:
    kind = file.content_type.partition(";")[0]
    return Operation("A file of the page", answer_type=kind, statuses=(304,))


def _sender(file: PageFile) -> Handler:
    async def send(call: Call) -> web.StreamResponse:
        return file.answer(call.request, call.request_id)

    return send
