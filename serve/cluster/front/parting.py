"""Parts prompts from decoding, call by call: apart.py decides, this keeps what it decides from."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from serve.cluster.front.apart import Decision, decide, next_server, stays
from serve.cluster.front.prompt import Lengths, Prompt
from serve.cluster.front.proxy import NOT_FORWARDED, forwarded_headers
from serve.cluster.front.replicas import Choice, Replica, ReplicaSet

logger = logging.getLogger(__name__)

_ASKED = {"do_remote_decode": True, "do_remote_prefill": False}
# what the first server need not do for its one token
_LEFT_OUT = (
    *("stream", "stream_options", "n", "logprobs", "top_logprobs", "min_tokens"),
    *("max_completion_tokens", "prediction", "seed"),
)


@dataclass(slots=True)
class PartingCounts:
    """num_apart: calls whose prompts were computed apart. num_moved: those of them that went on
    elsewhere then. num_together: calls that were not, by reason. handover_s: of all hand-overs of
    streams together. last: what was decided last, for people."""

    num_apart: int = 0
    num_moved: int = 0
    num_together: dict[str, int] = field(default_factory=dict)
    handover_s: float = 0.0
    last: str = "no call has come yet"


class Parting:
    """Chooses the servers of calls. is_on: the setting allows parting; otherwise every call goes to
    one server, and nothing is counted."""

    def __init__(self, replicas: ReplicaSet, *, is_on: bool) -> None:
        self.replicas = replicas
        self.counts = PartingCounts()
        self.lengths = Lengths()
        self._is_on = is_on

    @property
    def is_on(self) -> bool:
        """Whether any servers pull K/V."""
        return self._is_on and any(replica.load is not None for replica in self.replicas.replicas)

    def choose(
        self, prompt: Prompt, without: Collection[Replica]
    ) -> tuple[Choice | None, Replica | None]:
        """Returns the choice for a call, and the server where it is to go on after its prompt; None
        if it stays."""
        home = self.replicas.best(self._names(prompt), without)
        if home is None:
            return None, None
        if not self.is_on:
            if self._is_on:
                self._note(stays(0, "no_peers"), 0.0)
            return self._take(home, prompt), None
        ready = self.replicas.ready(without)
        num_tokens = self.lengths.of_prompt(prompt)
        decision = self._decide(ready, ready.index(home), prompt, num_tokens)
        self._note(decision, num_tokens)
        if decision.decode is None:
            return self._take(home, prompt), None
        chosen = ready[decision.prefill]
        at = self.replicas.candidates([chosen], prompt.names, num_tokens)[0]
        cost_s = None if at is None else at.first_s() - at.queue_s
        return self._take(chosen, prompt, cost_s), ready[decision.decode]

    def _take(self, replica: Replica, prompt: Prompt, cost_s: float | None = None) -> Choice:
        return self.replicas.take(replica, self._names(prompt), cost_s)

    def _names(self, prompt: Prompt) -> list[bytes]:
        return prompt.names if self.replicas.looks_at_prompts else []

    def _decide(
        self, ready: list[Replica], home: int, prompt: Prompt, num_tokens: float
    ) -> Decision:
        if not prompt.can_part:
            return stays(home, "unread")
        candidates = self.replicas.candidates(ready, prompt.names, num_tokens)
        return decide(candidates, home, num_tokens, self.lengths.of_answer(prompt))

    def _note(self, decision: Decision, num_tokens: float) -> None:
        counts = self.counts
        counts.last = decision.sentence(num_tokens)
        logger.debug("%s", counts.last)
        if decision.decode is not None:
            counts.num_apart += 1
            return
        reason = decision.reason
        counts.num_together[reason] = counts.num_together.get(reason, 0) + 1
        if reason == "does_not_pay":
            self.replicas.note_kept_together()

    def next_server(self, prompt: Prompt, at: Replica) -> Replica | None:
        """Returns where a call goes on whose prompt was computed at `at`, by what is known now;
        None: there."""
        ready = self.replicas.ready()
        if at not in ready:
            return None
        num_tokens = self.lengths.of_prompt(prompt)
        candidates = self.replicas.candidates(ready, prompt.names, num_tokens)
        num_output = self.lengths.of_answer(prompt)
        index = next_server(candidates, ready.index(at), num_tokens, num_output)
        return None if index is None else ready[index]

    def moved(self, prompt: Prompt, replica: Replica, seconds: float) -> None:
        """Notes the first token after a hand-over, and the seconds since the last one before it."""
        self.counts.num_moved += 1
        self.counts.handover_s += seconds
        replica.note_handover(seconds, self.lengths.of_prompt(prompt))


def prefill_body(body: bytes) -> bytes:
    """Returns the call with which a server computes a prompt for another one."""
    value: dict[str, Any] = orjson.loads(body)
    for name in _LEFT_OUT:
        value.pop(name, None)
    return orjson.dumps(value | {"max_tokens": 1, "kv_transfer_params": _ASKED})


def with_transfer(body: bytes, answer: bytes) -> bytes:
    """Returns the call with what the answer of the first server says of the prompt's K/V."""
    given = orjson.loads(answer).get("kv_transfer_params")
    if not isinstance(given, dict):
        return body
    at = body.rindex(b"}")
    return body[:at] + b',"kv_transfer_params":' + orjson.dumps(given) + b"}"


async def compute_prompt(
    session: aiohttp.ClientSession, request: web.BaseRequest, replica: Replica, body: bytes
) -> bytes | None:
    """Has a replica compute the prompt of a call whose answer is no stream. Returns the call for
    the replica that goes on; None if the prompt was not computed: then another one computes it."""
    headers = forwarded_headers(request.headers, NOT_FORWARDED)
    url = replica.url + request.raw_path
    try:
        async with session.post(url, data=prefill_body(body), headers=headers) as response:
            answer = await response.read()
        return with_transfer(body, answer) if response.status == 200 else None
    except (aiohttp.ClientError, OSError, ValueError, AttributeError) as error:
        logger.info("%s has not computed a prompt: %r", replica.url, error)
        return None
