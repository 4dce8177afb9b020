"""The HTTP server in front of equal replicas.

Calls that generate are relayed (relay.py): where a replica dies, shuts down or is too busy, another
one goes on. All other requests pass to any replica.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

import aiohttp
import orjson
from aiohttp import hdrs, web

from serve.cluster.front.apart import PREFILL_APART
from serve.cluster.front.metrics import metrics_text
from serve.cluster.front.parting import Parting
from serve.cluster.front.proxy import Proxy, UpstreamLostError
from serve.cluster.front.relay import NoReplicaError, Relay, RelayCounts
from serve.cluster.front.replicas import JOURNAL, ROUTING, Replica, ReplicaSet
from serve.errors import ConfigError, drop_frames
from serve.http.anthropic.errors import anthropic_error
from serve.http.edge.access import HostCheck
from serve.http.edge.body import Bodies, check_framing, held_body
from serve.http.edge.errors import (
    SERVER_ERROR,
    ApiError,
    common_headers,
    draining,
    error_response,
    new_request_id,
    overloaded,
    to_api_error,
)
from serve.http.edge.hop import load_hop_token
from serve.http.edge.listener import HttpListener
from serve.http.edge.settings import HttpSettings

logger = logging.getLogger(__name__)
FLUSH_S = 0.4
FIELD = b"continuation"
_ESCAPED = re.compile(rb"\\u00(?:63|6[fF]|6[eE]|74|69|75|61)")
"""A letter of FIELD in a JSON string, escaped although it need not be."""


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """replicas: the URLs of equal servers. lost_after_s: seconds without an answer after which a
    replica is lost. wait_s: seconds that a call waits for a replica that is ready. routing: how the
    next replica is chosen, see ReplicaSet.choose. prefill_apart: "auto" has the prompt of a call
    computed at another server than its answer where that is predicted to pay; "off" never."""

    replicas: tuple[str, ...]
    lost_after_s: float = 3.0
    wait_s: float = 60.0
    routing: str = "prefix"
    prefill_apart: str = "auto"

    def __post_init__(self) -> None:
        if self.routing not in ROUTING:
            raise ConfigError(f"routing must be one of {', '.join(ROUTING)}")
        if self.prefill_apart not in PREFILL_APART:
            raise ConfigError(f"prefill_apart must be one of {', '.join(PREFILL_APART)}")
        if self.lost_after_s <= 0.0 or self.wait_s < 0.0:
            raise ConfigError("lost_after_s must be above 0, and wait_s not below")
        for url in self.replicas:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"replicas: {url!r} does not begin with http:// or https://")


class Front:
    """A listener: start it, then stop it. http: the listener's own settings; keys and quotas are
    the replicas'."""

    def __init__(self, settings: FrontSettings, http: HttpSettings | None = None) -> None:
        self.settings = settings
        self.http = http or HttpSettings()
        self.replicas = ReplicaSet(
            settings.replicas, lost_after_s=settings.lost_after_s, routing=settings.routing
        )
        self.counts = RelayCounts()
        self.parting = Parting(self.replicas, is_on=settings.prefill_apart == "auto")
        self.num_calls = 0
        self.is_draining = False
        self._bodies = Bodies()
        self._check_host = HostCheck(self.http)
        self._session: aiohttp.ClientSession | None = None
        self._proxy: Proxy | None = None
        self._hop_token = ""
        self._listener = HttpListener(self._handle, self.http)

    @property
    def url(self) -> str:
        return self._listener.url

    async def start(self) -> None:
        """Opens the listener. Raises OSError, which names host and port, and ConfigError for a
        secret or certificates that cannot be read."""
        self._hop_token = load_hop_token(self.http.hop_key_file)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.settings.lost_after_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=(hdrs.USER_AGENT, hdrs.ACCEPT_ENCODING, hdrs.ACCEPT),
        )
        self._proxy = Proxy(self.http)
        await self.replicas.start(self._session)
        try:
            await self._listener.start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        await self.replicas.stop()
        await self._listener.close(FLUSH_S)
        self._bodies.close()
        for client in (self._session, self._proxy):
            if client is not None:
                await client.close()

    async def __aenter__(self) -> Front:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _handle(
        self, request: web.BaseRequest, refusal: ApiError | None
    ) -> web.StreamResponse:
        request_id = new_request_id()
        try:
            check_framing(request)
            self._check_host(request)
            own = self._own(request, request_id)
            if own is not None:
                return own
            if refusal is not None:
                raise refusal
            if self.is_draining:
                raise draining()
            if self.num_calls >= self.http.max_calls:
                raise overloaded("the server has too many requests")
            return await self._forward(request)
        except ConnectionError:
            raise
        except Exception as exc:
            if request.writer.output_size:  # part of an answer has been sent: close
                raise ConnectionResetError("an answer broke off") from exc
            is_anthropic = request.path.startswith("/v1/messages")
            shape = anthropic_error if is_anthropic else error_response
            response = shape(to_api_error(exc, request_id), request_id)
            drop_frames(exc)
            return response

    def _own(self, request: web.BaseRequest, request_id: str) -> web.Response | None:
        """Returns the answer to a request that is for the hop itself."""
        headers = common_headers(request_id)
        match request.method, request.path:
            case "GET", "/health":
                return web.json_response(self._health(), headers=headers)
            case "GET", "/ready":
                is_ready = self.replicas.num_ready and not self.is_draining
                return web.Response(status=200 if is_ready else 503, headers=headers)
            case "GET", "/metrics":
                text = metrics_text(self.replicas.replicas, self.counts, self.parting.counts)
                return web.Response(text=text, headers=headers)
        return None

    def _health(self) -> dict[str, object]:
        setting, counts = self.settings.prefill_apart, self.parting.counts
        parted: dict[str, object] = {"setting": setting}
        if setting != "off":
            parted |= {"apart": counts.num_apart, "together": counts.num_together}
            parted["last"] = counts.last
        return {"status": "ok", "prefill_apart": parted}

    async def _forward(self, request: web.BaseRequest) -> web.StreamResponse:
        self.num_calls += 1
        try:
            if request.method != "POST" and not request.body_exists:
                return await self._pass(request, None)
            async with held_body(request, self.http, self._bodies) as body:
                if request.method != "POST":
                    return await self._pass(request, body)
                await self._check_body(body)
                return await self._relay(request, body)
        except NoReplicaError:
            raise _no_replica() from None
        finally:
            self.num_calls -= 1

    async def _relay(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        assert self._session is not None
        self.counts.num_calls += 1
        relay = Relay(
            request,
            body,
            self.parting,
            self._session,
            self.counts,
            wait_s=self.settings.wait_s,
            http=self.http,
            hop_token=self._hop_token,
        )
        return await relay.run()

    async def _pass(self, request: web.BaseRequest, body: bytes | None) -> web.StreamResponse:
        """Passes a request that generates nothing to a replica; one for a stored response to that
        which has it."""
        tried: list[Replica] = []
        lacking: Replica | None = None
        while (choice := self.replicas.choose([], tried)) is not None:
            replica = choice.replica
            tried.append(replica)
            try:
                if not await self._has(replica, request):
                    lacking = replica
                    continue
                return await self._send(request, replica, body)
            except UpstreamLostError:
                if request.writer.output_size:
                    raise
                self.replicas.refused(replica)
        if lacking is None:
            raise NoReplicaError
        return await self._send(request, lacking, body)  # it says that there is none

    async def _send(
        self, request: web.BaseRequest, replica: Replica, body: bytes | None
    ) -> web.StreamResponse:
        assert self._proxy is not None
        return await self._proxy.forward(
            request,
            replica.url,
            body,
            more={},
            answer_headers={},
            left_out=frozenset(JOURNAL),  # what servers tell the hop is not for its clients
        )

    async def _has(self, replica: Replica, request: web.BaseRequest) -> bool:
        """Whether a replica has the stored response that a request is about; True if it is about
        none. Raises UpstreamLostError."""
        parts = request.path.split("/")
        if parts[1:3] != ["v1", "responses"] or len(parts) < 4:
            return True
        assert self._proxy is not None
        names = ("Authorization", "x-api-key")
        headers = {name: request.headers[name] for name in names if name in request.headers}
        url = f"{replica.url}/v1/responses/{parts[3]}"
        status, _ = await self._proxy.call("GET", url, headers, self.settings.lost_after_s)
        return status != 404

    async def _check_body(self, body: bytes) -> None:
        """Raises ApiError for a body that goes on with an answer itself: the hop would not know the
        tokens that it begins with."""
        if FIELD not in body and not _ESCAPED.search(body):
            return
        value = await self._bodies.run_in_thread(lambda: _parsed(body))
        if isinstance(value, dict) and FIELD.decode() in value:
            message = "continuation cannot be used through this server, which goes on by itself"
            raise ApiError(400, message, param="continuation", code="unsupported_parameter")


def _parsed(body: bytes) -> object:
    try:
        return orjson.loads(body)
    except ValueError:
        return None  # a replica refuses it


def _no_replica() -> ApiError:
    return ApiError(
        503,
        "no server is ready to answer",
        kind=SERVER_ERROR,
        code="no_replica",
        headers={"Retry-After": "2"},
    )
