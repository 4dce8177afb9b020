"""Limits and deadlines of the HTTP side."""

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
_MAX_INT = (1 << 31) - 1  # the system's int; as seconds 68 years


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Settings of one listener; times in seconds.

    host, port: where to listen; port 0 takes a free one.
    drain_s: how long a stop waits for running requests.
    max_body_bytes: larger requests are refused with 413.
    max_bodies_bytes: of all requests that are being read; more are refused with 429.
    body_timeout_s: a body must have arrived by then.
    body_min_rate: bytes per second that a body must arrive with, after the first seconds; 0: any.
    head_timeout_s: a request's head must have arrived by then, from its first byte on.
    first_request_timeout_s: a new connection must have sent its request head by then.
    keepalive_s: idle connections are closed after this.
    write_timeout_s: a stream whose reader makes no progress for this long is aborted.
    request_timeout_s: from a request's head to the end of its answer; clients ask for less with
        the header X-Request-Timeout.
    send_buffer_bytes: kernel buffer of one stream; small, so that a stalled reader shows.
    backlog: connections the kernel holds before they are accepted.
    max_connections: more are told to come back; fewer where the process may not open so many files.
    max_connections_per_address: from one address that is not this machine's own.
    max_calls: requests that are being answered; more are refused with 429.
    parse_inline_bytes: larger bodies are parsed off the event loop.
    vllm_metrics: /metrics tells what vLLM tells by vLLM's names, too.
    metrics_port: /metrics is on this port of the loopback address, without a key, and nowhere
    else; None: on the main listener, behind the same key as the API; 0 takes a free one.
    unknown_fields: what becomes of parameters that nobody knows: "refuse" them with 400, or
        "warn": answer, and name them in a header.
    max_responses, max_responses_bytes: of /v1/responses, kept in memory to be continued.
    api_keys: KEY or NAME:KEY each, from the environment; never shown.
    api_key_file: more keys, with limits; read again on SIGHUP.
    allow_no_key: anybody who reaches the port may use it, also from other machines.
    share_prefixes: cached prompts are shared between keys; others may then tell from the time of
        the first token what has been asked.
    allowed_hosts: names in the Host header; empty: on a loopback address its own names, else any.
    cors_origins: pages of these origins, such as https://a.example, may call from a browser.
    tls_cert, tls_key: files in PEM; with them HTTPS is spoken.
    tls_client_ca: clients must show a certificate that this file's authorities have signed.
    log_format: "text" or "json", a line each.
    access_log: a line for each request.
    otlp_endpoint: where spans of requests go, by OpenTelemetry's protocol over HTTP.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    drain_s: float = 30.0
    max_body_bytes: int = limits.BODY_BYTES
    max_bodies_bytes: int = limits.BODIES_BYTES
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
            raise ConfigError("host is no name or address: a part of it is too long") from error
        if not self.drain_s >= 0:
            raise ConfigError(f"drain_s must be a number of seconds from 0 on, not {self.drain_s}")
        for name in _POSITIVE:
            value = getattr(self, name)
            largest = math.inf if name == "max_bodies_bytes" else _MAX_INT
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
                " or let anybody in with --allow-no-key"
            )
        for origin in self.cors_origins:
            scheme, separator, name = origin.partition("://")
            if not (scheme in ("http", "https") and separator and name) or set(name) & set("/*, "):
                raise ConfigError(
                    f"cors_origins must be such as https://a.example, not {origin!r}: no path, and"
                    " no * in place of a name"
                )
        if self.max_responses < 0 or self.max_responses_bytes < 0:
            raise ConfigError("max_responses and max_responses_bytes must not be negative")

    @property
    def is_loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be {' or '.join(choices)}, not {value!r}")
