"""Logs a line per request: its key's name, route, status and counts. No prompts, paths or keys."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from serve.http.edge.counters import METHODS

if TYPE_CHECKING:
    from serve.http.calls.context import Call

logger = logging.getLogger("serve.access")

CLIENT_REQUEST_ID = "x-client-request-id"
FIELDS = "fields"  # the attribute of a log record that has them
_PROBES = ("/health", "/health/live", "/ping", "/ready", "/health/ready")


class AccessLog:
    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on

    def answered(self, call: Call, status: int) -> None:
        """Logs the end of a call. status 499: the client has left. Probes that succeed come several
        times a second and are logged at the level debug."""
        is_probe = status == 200 and call.route is not None and call.route.path in _PROBES
        level = logging.DEBUG if is_probe else logging.INFO
        if self._is_on and logger.isEnabledFor(level):
            fields = access_fields(call, status)
            texts = {name: "-" if value is None else value for name, value in fields.items()}
            text = " ".join(f"{name}={value}" for name, value in texts.items())
            logger.log(level, "%s", text, extra={FIELDS: fields})


def access_fields(call: Call, status: int) -> dict[str, Any]:
    """Returns the fields of the line. The server makes all values but the method and the client's
    request id, which are checked."""
    request, route = call.request, call.route
    fields: dict[str, Any] = {
        "id": call.request_id,
        "key": None if call.key is None else call.key.name,
        "method": request.method if request.method in METHODS else "other",
        "route": None if route is None else route.path,
        "status": status,
        "bytes": num_sent(request, call.response),
        "seconds": round(time.monotonic() - call.arrived_s, 4),
    }
    if call.error_code is not None:
        fields["error"] = call.error_code
    if CLIENT_REQUEST_ID in call.headers:
        fields["client_id"] = call.headers[CLIENT_REQUEST_ID]
    usage = call.policy.usage()
    if usage:
        first = [m.first_token_s - call.arrived_s for m in usage if m.first_token_s is not None]
        if first:
            fields["ttft"] = round(min(first), 4)
        fields["prompt_tokens"] = sum(m.num_prompt_tokens for m in usage)
        fields["completion_tokens"] = sum(m.num_output_tokens for m in usage)
        reasons = {reason for m in usage for reason in m.finish_reasons}
        fields["finish"] = "+".join(sorted(reasons)) or None
    return fields


def num_sent(request: web.BaseRequest, response: web.StreamResponse | None) -> int:
    """Returns the bytes of the answer: all that was written, or its body if it is not sent yet."""
    if response is None or response.prepared:
        return int(request.writer.output_size)
    return (response.content_length or 0) if isinstance(response, web.Response) else 0
