"""The replicas behind the hop: whether they answer, how busy they are, which one is next."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import aiohttp

from serve.cluster.front.apart import Candidate, ServerLoad
from serve.cluster.front.held import Held, rest_s
from serve.cluster.front.prefix_affinity import PrefixAffinity

logger = logging.getLogger(__name__)

CHECK_S = 0.5
JOURNAL = {"x-mergestep-journal": "1"}
ROUTING = ("prefix", "least-busy", "round-robin")
_LEAVE_S = 5.0
_TICK_S = 0.01  # predicted times that differ by less are equal
_LEAST_BLOCKS = 2
_LEARNING = 0.1
_FIRST_BLOCK_S = 0.02  # until it is measured
QUEUE_HEADER = "x-mergestep-queue-seconds"
LOAD_HEADER = "x-mergestep-load"
_SHARE_S = 10.0  # how far back the share of prompts looks
_FIRST_HANDOVER_S = 0.05  # until one is measured
_HANDOVER_LEARNING = 0.3
_BARRED_S = 60.0
_HOPE = 0.98  # for each call that a dear hand-over may have kept together


@dataclass(eq=False, slots=True)
class Replica:
    """A server. is_ready: it takes calls. is_lost: it has not answered for a while, or its
    connections broke. queue_s: its wait, as it predicted it at the last check; sent_s: what
    was sent since then and waits takes. attempts: the calls that it has
    not ended. load: what it says of itself if it can pull K/V. num_streams: those of this hop that
    decode there; num_others: those that it had besides at the last check. prompt_share: of its time
    lately. handover_s: what it takes to go on with an answer there, beside the pull. barred: until
    when it is not to go on with answers of the engines with these ids."""

    url: str
    is_ready: bool = False
    is_lost: bool = True
    num_calls: int = 0
    answered_s: float = 0.0
    queue_s: float = 0.0
    sent_s: float = 0.0
    num_checks: int = 0
    last_chosen: int = 0
    attempts: set[asyncio.Timeout] = field(default_factory=set)
    load: ServerLoad | None = None
    num_streams: int = 0
    num_others: int = 0
    prompt_share: float = 0.0
    handover_s: float = _FIRST_HANDOVER_S
    barred: dict[str, float] = field(default_factory=dict)

    def note_load(self, load: ServerLoad | None, seconds: float) -> None:
        """Takes what it says of itself, so many seconds after the last time."""
        before, self.load = self.load, load
        if load is None:
            return
        self.num_others = max(0, load.num_streams - self.num_streams)
        if before is not None and load.prompt_s >= before.prompt_s and seconds > 0.0:
            # of one check it may exceed 1, since prompt_s is rounded: only the mean is limited
            share = (load.prompt_s - before.prompt_s) / seconds
            mean = self.prompt_share + min(1.0, seconds / _SHARE_S) * (share - self.prompt_share)
            self.prompt_share = min(1.0, mean)

    def note_handover(self, seconds: float, num_tokens: float) -> None:
        """Learns from a hand-over to this replica, from the last token there to the first here."""
        pull_s = 0.0 if self.load is None else self.load.pull_s(num_tokens)
        more_s = max(0.0, seconds - pull_s)
        self.handover_s += _HANDOVER_LEARNING * (more_s - self.handover_s)

    def bar(self, other: Replica) -> None:
        """Notes that this replica does not go on with the other one's answers. It is forgotten
        after a minute, and when the other one is started again."""
        if other.load is not None:
            self.barred[other.load.engine] = time.monotonic() + _BARRED_S

    def sharing_load(self) -> ServerLoad | None:
        """Returns what it says of itself, without the engines with which it cannot share calls."""
        if self.load is None or not self.barred:
            return self.load
        now_s = time.monotonic()
        self.barred = {
            engine: until_s for engine, until_s in self.barred.items() if until_s > now_s
        }
        return replace(self.load, pulls_from=self.load.pulls_from - self.barred.keys())


class Choice(NamedTuple):
    """A replica for one call. queue_s: its predicted wait. num_new: the prompt's blocks that it is
    not known to have, which take it cost_s. num_checks: of the replica up to then."""

    replica: Replica
    queue_s: float
    num_new: int
    cost_s: float
    num_checks: int


class ReplicaSet:
    """Checks the replicas and chooses among them. lost_after_s: a replica that does not answer
    `/ready` for so long is lost: its streams go on elsewhere. routing: one of ROUTING."""

    def __init__(
        self, urls: Iterable[str], *, lost_after_s: float, routing: str = "prefix"
    ) -> None:
        self.replicas = [Replica(url.rstrip("/")) for url in urls]
        self._watches: dict[Replica, asyncio.Task[None]] = {}
        self._lost_after_s = lost_after_s
        self.looks_at_prompts = routing == "prefix"
        self._routing = routing
        self._affinity = PrefixAffinity()
        self._changed = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._num_chosen = 0
        self._block_s = _FIRST_BLOCK_S

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Checks every replica once, then again and again."""
        self._session = session
        await asyncio.gather(*(self._check(replica) for replica in self.replicas))
        for replica in self.replicas:
            self._watches[replica] = asyncio.create_task(self._watch(replica))

    async def stop(self) -> None:
        for task in self._watches.values():
            task.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)

    def use(self, urls: Iterable[str]) -> None:
        """Takes these servers instead of those up to now. What one that is gone still answers goes
        on at another one, once it is handed over or after some seconds."""
        known = {replica.url: replica for replica in self.replicas}
        wanted = [url.rstrip("/") for url in urls]
        for url, replica in known.items():
            if url not in wanted:
                self._watches.pop(replica).cancel()
                self.refused(replica)
                self._affinity.forget(url)
                loop = asyncio.get_running_loop()
                loop.call_later(_LEAVE_S, self.lost, replica, "it was taken away")
        self.replicas = [known[url] if url in known else self._joined(url) for url in wanted]

    def _joined(self, url: str) -> Replica:
        replica = Replica(url)
        self._watches[replica] = asyncio.create_task(self._watch(replica))
        return replica

    @property
    def num_ready(self) -> int:
        return sum(replica.is_ready for replica in self.replicas)

    def choose(self, names: list[bytes], without: Collection[Replica] = ()) -> Choice | None:
        """Returns the replica for a prompt with these blocks, of which there are none unless
        looks_at_prompts; None if no replica is ready.

        With the routing "prefix" it is that of the least predicted time to the first token: its
        queue, as it predicts it, and the blocks of the prompt that it has not answered before, at
        the measured seconds a block. Among those as good it is the least busy one."""
        chosen = self.best(names, without)
        return None if chosen is None else self.take(chosen, names)

    def choose_next(
        self, names: list[bytes], without: Collection[Replica], held: Held
    ) -> Choice | None:
        """Returns the replica that goes on with a stream whose server is gone. With the routing
        "prefix", and where all tell what their steps take, it is that of the least predicted time
        to the next token: its queue, and what it has to pull or to compute. Among those as good it
        is the one that has most of the K/V."""
        ready = self.ready(without)
        loads = {replica: load for replica in ready if (load := replica.load) is not None}
        if not ready or len(loads) < len(ready) or not self.looks_at_prompts:
            return self.choose(names, without)
        matching = self._affinity.num_matching(names)
        own: dict[Replica, float] = {}
        for replica, load in loads.items():
            share = matching.get(replica.url, 0) / max(1, len(names))
            own[replica] = max(held.at(load, replica.url), share * held.num_prompt)
        costs_s: dict[Replica, float] = {}
        for replica, load in loads.items():
            sources = [r for r in ready if r is not replica and load.can_pull_from(loads[r])]
            elsewhere = max((own[source] for source in sources), default=0.0)
            costs_s[replica] = rest_s(load, held.num_tokens, own[replica], elsewhere)

        def rank(replica: Replica) -> tuple[float, ...]:
            predicted_s = replica.queue_s + replica.sent_s + costs_s[replica]
            ticks = round(predicted_s / _TICK_S)
            return ticks, -own[replica], replica.num_calls, replica.last_chosen

        chosen = min(ready, key=rank)
        return self.take(chosen, names, costs_s[chosen])

    def best(self, names: list[bytes], without: Collection[Replica] = ()) -> Replica | None:
        """Returns the replica that `choose` takes."""
        ready = self.ready(without)
        if not ready:
            return None
        matching = self._affinity.num_matching(names)

        def rank(replica: Replica) -> tuple[float, ...]:
            if self._routing == "round-robin":
                return (replica.last_chosen,)
            num_new = len(names) - matching.get(replica.url, 0)
            predicted_s = replica.queue_s + replica.sent_s + self._block_s * num_new
            ticks = round(predicted_s / _TICK_S) if self.looks_at_prompts else 0
            return ticks, replica.num_calls, replica.last_chosen

        return min(ready, key=rank)

    def take(self, chosen: Replica, names: list[bytes], cost_s: float | None = None) -> Choice:
        """Gives a call to a replica. cost_s: what its prompt takes there; None: by its blocks."""
        num_new = len(names) - self._affinity.num_matching(names).get(chosen.url, 0)
        cost_s = self._block_s * num_new if cost_s is None else cost_s
        choice = Choice(chosen, chosen.queue_s + chosen.sent_s, num_new, cost_s, chosen.num_checks)
        self._affinity.add(names, chosen.url)
        self._num_chosen += 1
        chosen.last_chosen = self._num_chosen
        chosen.sent_s += cost_s
        return choice

    def ready(self, without: Collection[Replica] = ()) -> list[Replica]:
        return [r for r in self.replicas if r.is_ready and r not in without]

    def candidates(
        self, ready: list[Replica], names: list[bytes], num_tokens: float
    ) -> list[Candidate | None]:
        """Returns these replicas as they are at this moment, for a prompt; None for one that does
        not pull K/V."""
        matching = self._affinity.num_matching(names)
        found: list[Candidate | None] = []
        for replica in ready:
            load = replica.sharing_load()
            if load is None:
                found.append(None)
                continue
            new = 1.0 - matching.get(replica.url, 0) / max(1, len(names))
            found.append(
                Candidate(
                    load,
                    replica.queue_s + replica.sent_s,
                    replica.num_streams + replica.num_others,
                    replica.prompt_share,
                    max(1.0, new * num_tokens),
                    replica.handover_s,
                )
            )
        return found

    def note_kept_together(self) -> None:
        """Notes that parting does not pay, so that a dear hand-over is tried again some time."""
        for replica in self.replicas:
            replica.handover_s = max(_FIRST_HANDOVER_S, _HOPE * replica.handover_s)

    def note_first(self, choice: Choice, seconds: float) -> None:
        """Learns from the time to the first token of a call that this choice was made for."""
        self.note_end(choice)
        if choice.num_new >= _LEAST_BLOCKS:
            block_s = max(0.0, seconds - choice.queue_s) / choice.num_new
            self._block_s += _LEARNING * (block_s - self._block_s)

    def note_end(self, choice: Choice) -> None:
        """Notes that a call of this choice waits no more."""
        if choice.num_checks == choice.replica.num_checks:  # else the last check has counted it
            choice.replica.sent_s = max(0.0, choice.replica.sent_s - choice.cost_s)

    async def wait_for_one(self, seconds: float) -> bool:
        """Waits until a replica is ready; returns whether one is."""
        if seconds <= 0.0:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.num_ready:
                    self._changed.clear()
                    await self._changed.wait()
        return self.num_ready > 0

    def refused(self, replica: Replica) -> None:
        """Notes that a replica takes no calls for now; the next check tells when it does."""
        replica.is_ready = False

    def lost(self, replica: Replica, reason: str) -> None:
        """Notes that a replica does not answer, and ends what is read from it."""
        if not replica.is_lost:
            logger.warning("the replica %s is lost: %s", replica.url, reason)
            self._affinity.forget(replica.url)
        replica.is_lost, replica.is_ready = True, False
        now_s = asyncio.get_running_loop().time() if replica.attempts else 0.0
        for attempt in list(replica.attempts):
            attempt.reschedule(now_s)

    async def _watch(self, replica: Replica) -> None:
        while True:
            await self._check(replica)
            await asyncio.sleep(CHECK_S)

    async def _check(self, replica: Replica) -> None:
        assert self._session is not None
        loop = asyncio.get_running_loop()
        timeout = aiohttp.ClientTimeout(total=self._lost_after_s)
        began_s = loop.time()
        try:
            async with self._session.get(
                replica.url + "/ready", timeout=timeout, headers=JOURNAL
            ) as response:
                is_ready = response.status == 200
                queue_s = float(response.headers.get(QUEUE_HEADER, 0.0))
                load = ServerLoad.read(response.headers.get(LOAD_HEADER, ""))
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            is_over = loop.time() - max(replica.answered_s, began_s) >= self._lost_after_s
            if is_over or isinstance(error, aiohttp.ClientConnectorError):
                self.lost(replica, type(error).__name__)
            return
        replica.note_load(load, loop.time() - replica.answered_s)
        replica.answered_s = loop.time()
        replica.queue_s, replica.sent_s = queue_s, 0.0
        replica.num_checks += 1
        if replica.is_lost:
            logger.info("the replica %s answers", replica.url)
        replica.is_lost = False
        if is_ready and not replica.is_ready:
            replica.is_ready = True
            self._changed.set()
        replica.is_ready = is_ready
