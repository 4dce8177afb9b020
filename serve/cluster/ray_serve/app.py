"""Builds the application: `python -m ray.serve.scripts run serve.cluster.ray_serve.app:build_app`.

Two deployments: the ingress takes HTTP calls from Ray Serve's proxies and looks at their prompts,
the servers are `serve run` processes. Calls and streams pass through both unchanged; those whose
replica is lost go on at another one (continuing.py).
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import quote

import orjson

from serve.cluster.front.front import FIELD
from serve.cluster.front.prefix_affinity import block_names
from serve.cluster.front.replicas import JOURNAL
from serve.cluster.ray_serve.continuing import ContinuedCall
from serve.cluster.ray_serve.policy import QueuePolicy
from serve.cluster.ray_serve.server_replica import (
    CallSent,
    ServerReplica,
    check_environment,
    check_path,
)
from serve.errors import ConfigError, RequestError
from serve.http.edge.errors import ApiError

STATS_PERIOD_S = 0.5
MAX_CALLS = 1024
"""That a replica answers at once; its server bounds them itself."""
_NUMBERS = {
    "min_replicas": 1,
    "max_replicas": 1,
    "cpus_per_replica": 1,
    "queue_seconds": 1.0,
    "grow_seconds": 5.0,
    "shrink_seconds": 60.0,
}
_KEPT = "".join(chr(code) for code in range(0x21, 0x7F))
"""Characters of a path and query that stay as they are; a percent sign is of an escape already."""
_OF_RAY = ("host", "port", "quiet", "more_models", "tls_cert", "tls_key")


class Ingress:
    """Passes HTTP calls to a replica that the router chooses."""

    def __init__(self, servers: Any) -> None:
        """servers: a handle of the deployment."""
        self._servers = servers

    async def __call__(self, request: Any) -> Any:
        """request: Starlette's."""
        from starlette.responses import Response, StreamingResponse

        try:
            path = path_of(request.scope)
        except RequestError as error:
            refusal = ApiError(400, str(error), code=error.code)
            return Response(refusal.body(), status_code=400, media_type="application/json")
        sent = call_of(
            request.method,
            path,
            [
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in request.headers.raw
            ],
            await request.body(),
        )
        if sent["call"]:
            answer: Any = ContinuedCall(
                lambda body, headers: self._answer({**sent, "body": body, "headers": headers}),
                path,
                sent["headers"],
                sent["body"],
            )
            status, headers = await answer.head()
            rest = answer.rest()
        else:
            answer = self._answer(sent)
            status, headers = await anext(answer)
            rest = _rest_of(answer)
        streamed = StreamingResponse(rest, status_code=status)
        streamed.raw_headers = [(a.encode("latin-1"), b.encode("latin-1")) for a, b in headers]
        return streamed

    def _answer(self, sent: CallSent) -> Any:
        return self._servers.call.options(stream=True).remote(sent)


async def _rest_of(answer: Any) -> AsyncIterator[bytes]:
    async for content in answer:
        yield content


def path_of(scope: Mapping[str, Any]) -> str:
    """Returns path and query as the client has sent them. RequestError if they name a host.

    scope: of ASGI; its `path` has lost the escapes, `raw_path` has them.
    """
    raw = scope.get("raw_path") or quote(scope["path"]).encode()
    query = scope.get("query_string", b"")
    path = quote(raw + (b"?" + query if query else b""), safe=_KEPT)
    check_path(path)
    return path


def call_of(method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> CallSent:
    """Returns a call with the names of its prompt's blocks, and a name of its own if it can go on
    at another replica: not if its client goes on with answers itself."""
    names: list[bytes] = []
    call = ""
    if method == "POST" and body:
        given = {name.lower(): value for name, value in headers}
        try:
            read = orjson.loads(body)
            if isinstance(read, dict):
                names = block_names(read, given.get("authorization", ""))
                if FIELD.decode() not in read and not given.keys() & JOURNAL.keys():
                    call = secrets.token_hex(8)
        except (ValueError, TypeError):  # TypeError: nested too deeply to be written again
            pass  # the server says what is wrong
    return CallSent(method=method, path=path, headers=headers, body=body, names=names, call=call)


def build_app(args: Mapping[str, Any]) -> Any:
    """Returns the application for `serve.run` or a Ray Serve config file.

    args: `model` and other settings of `serve run` by name, and min_replicas, max_replicas,
    cpus_per_replica, queue_seconds (the predicted wait above which a replica more is started),
    grow_seconds and shrink_seconds (how long it must have been so). ConfigError names what is
    wrong, also if Ray Serve is not installed.
    """
    numbers, settings = split_args(args)
    check_environment(os.environ, settings)
    try:
        from ray import serve
        from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

        from serve.cluster.ray_serve.router import PredictedRouter
    except ImportError as error:
        raise ConfigError(
            "the application needs Ray Serve: pip install 'mergestep[ray-serve]'"
        ) from error
    cpus = int(numbers["cpus_per_replica"])
    settings.setdefault("compute_threads", cpus)
    kwargs = {f"{name}_s": numbers[f"{name}_seconds"] for name in ("queue", "grow", "shrink")}
    policy = AutoscalingPolicy(policy_function=QueuePolicy, policy_kwargs=kwargs)
    scaling = AutoscalingConfig(
        min_replicas=int(numbers["min_replicas"]),
        max_replicas=int(numbers["max_replicas"]),
        policy=policy,
        metrics_interval_s=STATS_PERIOD_S,
        look_back_period_s=2 * STATS_PERIOD_S,
        upscale_delay_s=0.0,  # the policy waits itself
        downscale_delay_s=0.0,
    )
    servers = serve.deployment(
        ServerReplica,
        name="Server",
        max_ongoing_requests=MAX_CALLS,
        autoscaling_config=scaling,
        ray_actor_options={"num_cpus": cpus},
        request_router_config=RequestRouterConfig(
            request_router_class=PredictedRouter, request_routing_stats_period_s=STATS_PERIOD_S
        ),
    )
    ingress = serve.deployment(
        Ingress, name="Ingress", max_ongoing_requests=MAX_CALLS, ray_actor_options={"num_cpus": 0}
    )
    return ingress.bind(servers.bind(settings))


def split_args(args: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """Returns the numbers of the application and the settings of its servers. ConfigError."""
    numbers: dict[str, float] = {}
    for name, default in _NUMBERS.items():
        value = args.get(name, default)
        is_number = type(value) in (int, float) and 0 <= value < math.inf
        if not is_number or (type(default) is int and value != int(value)):
            raise ConfigError(f"{name} must be a number from 0 on, not {value!r}")
        numbers[name] = value
    if not numbers["min_replicas"] <= numbers["max_replicas"] or not numbers["max_replicas"]:
        raise ConfigError(
            f"min_replicas {numbers['min_replicas']} must be from 0 to max_replicas, which is at"
            " least 1"
        )
    if not numbers["cpus_per_replica"]:
        raise ConfigError("cpus_per_replica must be at least 1")
    settings = {name: value for name, value in args.items() if name not in _NUMBERS}
    for name in _OF_RAY:
        if name in settings:
            raise ConfigError(f"{name} is Ray Serve's own, and no setting of its servers")
    if settings.get("api_keys"):
        raise ConfigError("api_keys is no argument: write the keys to a file, and set api_key_file")
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if settings.get(name, 1) != 1:
            raise ConfigError(f"{name}: a replica is one process here; see `serve cluster`")
    return numbers, settings
