"""Settings of the HTTP server."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from serve.errors import ConfigError
from serve.http.edge import limits

UNKNOWN_FIELDS = ("refuse", "warn")
LOG_FORMATS = ("text", "json")
_POSITIVE = (
    "max_body_bytes",
    "max_bodies_bytes",
    "max_work_bytes",
    "max_connections",
    "max_connections_per_address",
    "max_calls",
    "backlog",
    "send_buffer_bytes",
    "body_timeout_s",
    "head_timeout_s",
    "first_request_timeout_s",
    "keepalive_s",
    "write_timeout_s",
    "request_timeout_s",
)
_UNBOUNDED = ("max_bodies_bytes", "max_work_bytes")
_MAX_INT = (1 << 31) - 1  # the operating system's int; as seconds it is 68 years


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Settings of one listener; times in seconds.

    host, port: where to listen; port 0 takes a free one.
    enable_sleep_mode: /sleep has the model give its memory back until /wake_up.
    drain_s: how long a stop waits for running requests.
    max_body_bytes: larger requests are refused with 413.
    max_bodies_bytes: bodies of all requests that are being read; more are refused with 429.
    max_work_bytes: expected memory of all calls in progress that take far more than their bodies
        have bytes, such as tokenizing long texts; more are refused with 429.
    body_timeout_s: how long a body may take to arrive.
    body_min_rate: bytes per second of a body, after the first seconds; 0 allows any rate.
    head_timeout_s: how long a request's head may take to arrive, from its first byte on.
    first_request_timeout_s: how long a new connection may take to send its first request head.
    keepalive_s: idle connections are closed after this.
    write_timeout_s: a stream whose reader makes no progress for this long is aborted.
    request_timeout_s: from a request's head to the end of its answer; clients set less with
        the header X-Request-Timeout.
    send_buffer_bytes: kernel buffer of one stream; small, to detect stalled readers.
    backlog: connections the kernel holds before they are accepted.
    max_connections: more are refused with 429; the limit of open files may lower it.
    max_connections_per_address: from one address that is not this machine's own.
    max_calls: requests that are being answered; more are refused with 429.
    parse_inline_bytes: larger bodies are parsed in a thread.
    vllm_metrics: /metrics has metrics that vLLM has under vLLM's names, too.
    metrics_port: serves /metrics on this port of the loopback address, without a key, and nowhere
        else; None: on the main listener, with the API's key; 0 takes a free port.
    unknown_fields: "refuse" answers unknown parameters with 400; "warn" answers the request and
        lists them in a header.
    max_responses, max_responses_bytes: responses of /v1/responses that are kept in memory.
    api_keys: KEY or NAME:KEY each, from the environment; never printed.
    api_key_file: more keys, with limits; read again on SIGHUP.
    hop_key_file: a secret that this server and `serve front` share; what another server has counted
        of a stream that goes on here does not count towards a quota again.
    allow_no_key: every client that reaches the port may use it, also from other machines.
    share_prefixes: keys share cached prompts; the time to the first token may then reveal to
        one client what another has sent.
    allowed_hosts: names in the Host header; empty: on a loopback address its own names, else any.
    cors_origins: pages of these origins, such as https://a.example, may call from a browser.
    tls_cert, tls_key: PEM files; with them the server speaks HTTPS.
    tls_client_ca: clients must present a certificate signed by an authority in this file.
    log_format: "text" or "json", one line per record.
    access_log: logs a line per request.
    otlp_endpoint: receives spans of requests by OpenTelemetry's protocol over HTTP.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    enable_sleep_mode: bool = False
    drain_s: float = 30.0
    max_body_bytes: int = limits.BODY_BYTES
    max_bodies_bytes: int = limits.BODIES_BYTES
    max_work_bytes: int = limits.WORK_BYTES
    body_timeout_s: float = limits.BODY_S
    body_min_rate: int = limits.BODY_MIN_RATE
    head_timeout_s: float = limits.HEAD_S
    first_request_timeout_s: float = limits.FIRST_REQUEST_S
    keepalive_s: float = limits.KEEPALIVE_S
    write_timeout_s: float = limits.WRITE_S
    request_timeout_s: float = limits.REQUEST_S
    send_buffer_bytes: int = limits.SEND_BUFFER_BYTES
    backlog: int = limits.BACKLOG
    max_connections: int = limits.CONNECTIONS
    max_connections_per_address: int = limits.CONNECTIONS_PER_ADDRESS
    max_calls: int = limits.CALLS
    parse_inline_bytes: int = limits.PARSE_INLINE_BYTES
    vllm_metrics: bool = True
    metrics_port: int | None = None
    unknown_fields: str = "refuse"
    max_responses: int = 1024
    max_responses_bytes: int = 64 << 20
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: str | None = None
    hop_key_file: str | None = None
    allow_no_key: bool = False
    share_prefixes: bool = False
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    log_format: str = "text"
    access_log: bool = True
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, not {self.port}")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            text = f"metrics_port must be between 0 and 65535, not {self.metrics_port}"
            raise ConfigError(text)
        if not self.host:
            raise ConfigError("host must be a name or an address, not empty")
        try:
            self.host.encode("idna")
        except UnicodeError as error:
            raise ConfigError(
                "host is not a name or an address: a part of it is too long"
            ) from error
        if not self.drain_s >= 0:
            raise ConfigError(f"drain_s must be a number of seconds from 0 on, not {self.drain_s}")
        for name in _POSITIVE:
            value = getattr(self, name)
            largest = math.inf if name in _UNBOUNDED else _MAX_INT
            if not 0 < value <= largest or value == math.inf:
                raise ConfigError(f"{name} must be positive, at most {largest:g}, not {value}")
        if self.body_min_rate < 0:
            raise ConfigError(f"body_min_rate must not be negative, not {self.body_min_rate}")
        _check_choice("unknown_fields", self.unknown_fields, UNKNOWN_FIELDS)
        _check_choice("log_format", self.log_format, LOG_FORMATS)
        self._check_access()

    def _check_access(self) -> None:
        if not (self.is_loopback or self.api_keys or self.api_key_file or self.allow_no_key):
            raise ConfigError(
                f"host {self.host} can be reached from other machines, and there is no API key:"
                " set --api-key-file or the environment's MERGESTEP_API_KEY, listen on 127.0.0.1,"
                " or allow every client with --allow-no-key"
            )
        for origin in self.cors_origins:
            scheme, separator, name = origin.partition("://")
            if not (scheme in ("http", "https") and separator and name) or set(name) & set("/*, "):
                raise ConfigError(
                    f"cors_origins must be origins such as https://a.example, not {origin!r}:"
                    " no path, and no * in place of a name"
                )
        if self.max_responses < 0 or self.max_responses_bytes < 0:
            raise ConfigError("max_responses and max_responses_bytes must not be negative")

    @property
    def is_loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be {' or '.join(choices)}, not {value!r}")
