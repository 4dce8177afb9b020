"""Reads a server's figures from GET /metrics if its metric names are known."""

from __future__ import annotations

import math
import re

from bench.load.client.record import ServerSample

_NAMES = {  # the names of vLLM (and of servers that use them), and of llama.cpp
    b"vllm:num_requests_running": "running",
    b"vllm:num_requests_waiting": "waiting",
    b"vllm:kv_cache_usage_perc": "usage",
    b"vllm:gpu_cache_usage_perc": "usage",
    b"llamacpp:requests_processing": "running",
    b"llamacpp:requests_deferred": "waiting",
    b"llamacpp:kv_cache_usage_ratio": "usage",
}
_LINE = re.compile(rb"^(" + b"|".join(_NAMES) + rb")(?:\{[^\n]*\})?[ \t]+(\S+)", re.MULTILINE)


def read_metrics(text: bytes, at_s: float) -> ServerSample | None:
    """Parses Prometheus' text format. Adds up several engines behind one address, averages their
    usage, and ignores values that are not finite. Returns None if no name is known."""
    values_by_name: dict[str, list[float]] = {}
    for name, text_value in _LINE.findall(text):
        try:
            value = float(text_value)
        except ValueError:
            continue
        if math.isfinite(value):
            values_by_name.setdefault(_NAMES[name], []).append(value)
    if "running" not in values_by_name:
        return None
    usage = values_by_name.get("usage")
    return ServerSample(
        at_s,
        sum(values_by_name["running"]),
        sum(values_by_name.get("waiting", ())),
        sum(usage) / len(usage) if usage else None,
    )
