"""Limits and deadlines of the HTTP side."""

from __future__ import annotations

from dataclasses import dataclass, field

from serve.errors import ConfigError

UNKNOWN_FIELDS = ("refuse", "warn")


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Settings of one listener; times in seconds.

    host, port: where to listen; port 0 takes a free one.
    drain_s: how long a stop waits for running requests.
    max_body_bytes: larger requests are refused with 413.
    body_timeout_s: a body must have arrived by then.
    first_request_timeout_s: a new connection must have sent its request head by then.
    keepalive_s: idle connections are closed after this.
    write_timeout_s: a stream whose reader makes no progress for this long is aborted.
    send_buffer_bytes: kernel buffer of one stream; small, so that a stalled reader shows.
    backlog: connections the kernel holds before they are accepted.
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
    """

    host: str = "127.0.0.1"
    port: int = 8000
    drain_s: float = 30.0
    max_body_bytes: int = 8 << 20
    body_timeout_s: float = 30.0
    first_request_timeout_s: float = 15.0
    keepalive_s: float = 75.0
    write_timeout_s: float = 30.0
    send_buffer_bytes: int = 128 << 10
    backlog: int = 4096
    parse_inline_bytes: int = 256 << 10
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
        if not (self.is_loopback or self.api_keys or self.api_key_file or self.allow_no_key):
            raise ConfigError(
                f"host {self.host} can be reached from other machines, and there is no API key:"
                " set --api-key-file or the environment's MERGESTEP_API_KEY, listen on 127.0.0.1,"
                " or let anybody in with --allow-no-key"
            )
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes must be positive, not {self.max_body_bytes}")

        if self.max_responses < 0 or self.max_responses_bytes < 0:
            raise ConfigError("max_responses and max_responses_bytes must not be negative")
        if self.unknown_fields not in UNKNOWN_FIELDS:
            names = " or ".join(UNKNOWN_FIELDS)
            raise ConfigError(f"unknown_fields must be {names}, not {self.unknown_fields!r}")

    @property
    def is_loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")
