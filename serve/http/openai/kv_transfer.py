"""kv_transfer_params: prefill on one engine and decoding on another one, in vLLM's form.

A router sends a request to an engine for prefill, with do_remote_decode and max_tokens 1. The
answer names that engine, and the router puts what it says into the same request to an engine for
decoding, which pulls the prompt's K/V. Here pages have names that follow from the prompt, so that
engine asks all its peers for them anyway. It connects to an address that a request names only if
the setting kv_peers allows any.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from serve.errors import RequestError
from serve.http.schema.fields import (
    Boolean,
    Integer,
    JsonObject,
    Parsed,
    Record,
    Schema,
    String,
    Unknown,
)

if TYPE_CHECKING:
    from serve.engine.engine import Engine
    from serve.engine.stats import EngineStats
    from serve.sampling_params import SamplingParams

_MAX_BYTES = 512 << 10  # a block id takes some bytes, and a long prompt has thousands
_KNOWN = Record(
    {
        "do_remote_decode": Boolean(),
        "do_remote_prefill": Boolean(),
        "remote_engine_id": String(256),
        "remote_host": String(253, pattern="[0-9A-Za-z.:_-]*"),
        "remote_port": Integer(0, 65_535),
    }
)
_ANY = JsonObject(_MAX_BYTES)


@dataclass(frozen=True, slots=True)
class KVTransfer:
    """What a request says: whether another engine goes on; whether one has computed the prompt, or
    is computing it, and its address."""

    decodes_elsewhere: bool = False
    is_prefilled: bool = False
    peer: str | None = None


def with_transfer(params: SamplingParams, given: KVTransfer | None) -> SamplingParams:
    """Returns the parameters of a request that says this."""
    if given is None or not given.is_prefilled:
        return params
    return params.changed(awaits_prefill=True)


def name_peer(engine: Engine, given: KVTransfer | None) -> None:
    """Tells the engine where the prompt of a request was computed. The engine decides whether it
    connects there."""
    if given is not None and given.peer is not None:
        engine.use_peer(given.peer)


def _parse(value: Any, where: str, unknown: Unknown) -> KVTransfer:
    """Checks the fields that routers set; what else is in the object is the other engine's."""
    given = _ANY.check(value, where, unknown)
    known = {name: item for name, item in given.items() if name in _KNOWN.fields}
    checked = _KNOWN.check(known, where, unknown)
    decodes = checked.get("do_remote_decode", False)
    prefilled = checked.get("do_remote_prefill", False)
    if decodes and prefilled:
        raise RequestError(
            f"{where} has do_remote_decode and do_remote_prefill; a request has one of them",
            param=where,
        )
    host, port = checked.get("remote_host"), checked.get("remote_port")
    if not prefilled or not host or not port:
        return KVTransfer(decodes, prefilled)
    url = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    return KVTransfer(is_prefilled=True, peer=url)


def _schema() -> Schema:
    return {**_KNOWN.schema(), "additionalProperties": True}


TRANSFER = Parsed(_parse, _schema())


def transfer_answer(stats: EngineStats, request_id: str, num_tokens: int) -> dict[str, Any] | None:
    """Returns what an engine that decodes needs of this one, which has computed a prompt of
    num_tokens tokens. None if nobody can pull K/V from here."""
    peers = stats.kv_peers
    if peers is None or peers.url is None:
        return None
    host, port = _reachable(peers.url)
    page_tokens = max(1, stats.kv_page_bytes // stats.kv_bytes_per_token)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": list(range(num_tokens // page_tokens)),
        "remote_engine_id": peers.engine_id,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
    }


def _reachable(url: str) -> tuple[str, int]:
    """Returns the host and the port of a listener, for others: an address that stands for all of
    this machine's becomes its name."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 0
    try:
        is_any = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_any = not host
    return (socket.gethostname() if is_any else host), port
