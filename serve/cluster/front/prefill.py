"""Has a server compute the prompt of a call that another one answers, before that one gets the call
or at the same time.

A server that gets the call meanwhile pulls the prompt's K/V chunk by chunk, and computes it itself
if none comes for a while. So both get the call at once only where the first one will be soon.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from serve.cluster.front.proxy import NOT_FORWARDED, forwarded_headers
from serve.cluster.front.replicas import Choice, Replica, ReplicaSet
from serve.http.edge.errors import ERROR_CODE_HEADER
from serve.http.edge.hop import HOP_HEADER

logger = logging.getLogger(__name__)

AWAITING = b',"kv_transfer_params":{"do_remote_prefill":true}'
"""In the body of a call whose prompt another server computes at this moment."""
CLIENT_ONLY = NOT_FORWARDED | {HOP_HEADER}
"""Headers of a client that replicas do not get with its call."""
_ASKED = {"do_remote_decode": True, "do_remote_prefill": False}
# what the first server need not do for its one token
_LEFT_OUT = (
    *("stream", "stream_options", "n", "logprobs", "top_logprobs", "min_tokens"),
    *("max_completion_tokens", "prediction", "seed"),
)


def prefill_body(body: bytes) -> bytes:
    """Returns the call with which a server computes a prompt for another one."""
    value: dict[str, Any] = orjson.loads(body)
    for name in _LEFT_OUT:
        value.pop(name, None)
    return orjson.dumps(value | {"max_tokens": 1, "kv_transfer_params": _ASKED})


def transfer_field(answer: bytes) -> bytes:
    """Returns what the answer of the first server says of the prompt's K/V, as a field of the call
    for the second one; nothing if it says nothing."""
    given = orjson.loads(answer).get("kv_transfer_params")
    return b',"kv_transfer_params":' + orjson.dumps(given) if isinstance(given, dict) else b""


async def compute_prompt(
    session: aiohttp.ClientSession,
    request: web.BaseRequest,
    replicas: ReplicaSet,
    choice: Choice,
    body: bytes,
) -> bytes | None:
    """Has the chosen replica compute the prompt of a call. Returns a field for the body of the
    replica that goes on; None if the prompt was not computed: then another one computes it."""
    replica = choice.replica
    replica.num_calls += 1
    try:
        async with asyncio.timeout(None) as attempt:  # ReplicaSet.lost() ends it
            replica.attempts.add(attempt)
            try:
                return await _compute(session, request, replicas, replica, body)
            finally:
                replica.attempts.discard(attempt)
    except TimeoutError:
        logger.info("%s is lost while it computes a prompt", replica.url)
        return None
    finally:
        replica.num_calls -= 1
        replicas.note_end(choice)


async def _compute(
    session: aiohttp.ClientSession,
    request: web.BaseRequest,
    replicas: ReplicaSet,
    replica: Replica,
    body: bytes,
) -> bytes | None:
    headers = forwarded_headers(request.headers, CLIENT_ONLY)
    url = replica.url + request.raw_path
    try:
        async with session.post(url, data=prefill_body(body), headers=headers) as response:
            answer = await response.read()
        if response.status == 200:
            return transfer_field(answer)
        if response.status >= 500 or response.headers.get(ERROR_CODE_HEADER) == "overloaded":
            replicas.refused(replica)  # or further calls would wait for it in vain
        logger.info("%s has not computed a prompt: %d", replica.url, response.status)
    except (aiohttp.ClientError, OSError) as error:
        replicas.refused(replica)
        logger.info("%s has not computed a prompt: %r", replica.url, error)
    except (ValueError, AttributeError) as error:
        logger.info("%s has not computed a prompt: %r", replica.url, error)
    return None


class PromptAhead:
    """A prompt that a server computes while another one has the call. Stop it at the end."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        request: web.BaseRequest,
        replicas: ReplicaSet,
        choice: Choice,
        body: bytes,
    ) -> None:
        self._ended_s: float | None = None
        computing = compute_prompt(session, request, replicas, choice, body)
        self._task = asyncio.create_task(self._run(computing))

    async def _run(self, computing: Awaitable[bytes | None]) -> None:
        if await computing is not None:
            self._ended_s = asyncio.get_running_loop().time()

    def seconds_since(self) -> float | None:
        """Returns the seconds since the prompt was computed; None if it is not: the other server
        has not waited for it, then."""
        now_s = asyncio.get_running_loop().time()
        return None if self._ended_s is None else now_s - self._ended_s

    async def stop(self) -> None:
        """Ends what is still being computed: the other server has its answer without it."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
