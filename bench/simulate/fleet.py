"""Several equal servers under one virtual clock, behind the real decisions of `serve front`.

Each server is a simulated engine. `ReplicaSet` and `Parting` choose among them, with what the
simulated servers would publish. K/V that is pulled is not computed again: the rest of a call is a
sequence of one row whose decode rows attend to the whole context. Where the hop sends a call to two
servers at once, the second one has pulled all but the last chunk when the prompt is computed.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from bench.plan.cost import StepCost
from bench.simulate.engine import OTHER, SimulatedEngine, Step, make_sequence
from bench.simulate.settings import SimulationSettings
from serve.cluster.front.apart import ServerLoad
from serve.cluster.front.parting import Parting
from serve.cluster.front.prefix_affinity import BLOCK_BYTES
from serve.cluster.front.prompt import NO_PROMPT, Prompt
from serve.cluster.front.replicas import CHECK_S, Choice, ReplicaSet
from serve.engine.early_rejection import forecast_load
from serve.engine.early_rejection import predicted_ttft_s as ttft_s
from serve.request import Request
from serve.sampling_params import SamplingParams
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence as EngineSequence
from serve.scheduler.step_time import StepWork

Way = Literal["merged", "apart", "auto"]
_ID_BYTES = 4  # of a token in the text of a body
_WARM_UP = 3  # calls of a kind
_IDLE_CHECKS = 64  # after which nothing of a busy time is left in what servers tell


@dataclass(frozen=True, slots=True)
class FleetCall:
    """A call that arrives at_s seconds after the start."""

    at_s: float
    num_prompt: int
    num_output: int


@dataclass(slots=True)
class FleetRecord:
    """When its tokens reached the client."""

    call: FleetCall
    times: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.call.at_s

    @property
    def tpot_s(self) -> float:
        return (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1)


@dataclass(frozen=True, slots=True)
class HandOver:
    """What it takes until a server goes on with a prompt that another one has computed: seconds,
    and further ones for each token whose K/V is pulled."""

    fixed_s: float = 0.0
    token_s: float = 0.0

    def seconds(self, num_tokens: int) -> float:
        return self.fixed_s + num_tokens * self.token_s


class _PulledCost:
    """Adds the contexts of pulled K/V to the cost of a server's steps."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self.num_context = 0

    def seconds(self, work: StepWork) -> float:
        if self.num_context and work.num_decodes:
            work = StepWork(
                work.num_decodes,
                work.num_context + self.num_context,
                work.num_rows,
                work.num_pairs,
                work.num_chunks,
                work.samples,
            )
        return self._cost.seconds(work)


@dataclass(slots=True)
class _Leg:
    """What a call does at one server. choice: until its first token. following: whether it may go
    on elsewhere then. then_at: the choice of the server that waits for the prompt. moved_at_s: when
    it left another server."""

    record: FleetRecord
    prompt: Prompt
    num_output: int
    choice: Choice | None = None
    following: bool = False
    gives_tokens: bool = True
    then_at: Choice | None = None
    moved_at_s: float | None = None
    num_pulled: int = 0


class _Server:
    def __init__(self, number: int, cost: StepCost, settings: SimulationSettings) -> None:
        self.number = number
        self.scheduler = settings.make_scheduler(has_prefixes=False)
        self.cost = _PulledCost(cost)
        self.engine = SimulatedEngine(self.scheduler, self.cost)
        self.legs: dict[EngineSequence, _Leg] = {}

    def add(self, leg: _Leg, num_prompt: int, now_s: float) -> None:
        if not self.scheduler.has_work():
            self.engine.now_s = max(self.engine.now_s, now_s)
        params = SamplingParams(max_tokens=leg.num_output, seed=0)
        sequence = make_sequence(Request("", None, (OTHER,) * num_prompt, params, now_s))
        sequence.num_expected_rows = num_prompt
        self.legs[sequence] = leg
        self.cost.num_context += leg.num_pulled
        self.engine.add(sequence, leg.num_output)

    def warm_up(self, call: FleetCall, count: int) -> None:
        """Lets it learn what steps take from so many equal calls, before the clock starts."""
        record = FleetRecord(call)
        for _ in range(count):
            leg = _Leg(record, NO_PROMPT, call.num_output)
            self.add(leg, call.num_prompt, 0.0)
        while self.scheduler.has_work():
            for sequence in self.engine.step() or ():
                self.ended(sequence)
        self.engine.now_s = 0.0

    def ended(self, sequence: EngineSequence) -> _Leg:
        leg = self.legs.pop(sequence)
        self.cost.num_context -= leg.num_pulled
        return leg


class FleetSimulation:
    """Runs calls through num_servers servers. way: "merged": every call stays at one server;
    "auto": the hop decides; "apart": the first num_prefill servers compute all prompts, the others
    decode. warm_up: calls from which each server has learned, as one that has run for a while."""

    def __init__(
        self,
        cost: StepCost,
        settings: SimulationSettings,
        hand_over: HandOver,
        way: Way,
        num_servers: int = 2,
        *,
        num_prefill: int = 1,
        warm_up: Sequence[FleetCall] = (),
    ) -> None:
        assert 0 < num_prefill < num_servers, f"{num_prefill} of {num_servers}"
        self._delays = settings.delays
        self._hand_over = hand_over
        self._way = way
        self._servers = [_Server(number, cost, settings) for number in range(num_servers)]
        self._replicas = ReplicaSet([f"http://{n}" for n in range(num_servers)], lost_after_s=1.0)
        self.parting = Parting(self._replicas, is_on=way == "auto")
        self._of = dict(zip(self._replicas.replicas, self._servers, strict=True))
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._num_left = 0
        self._num_idle = 0  # checks in a row that found all servers idle
        self._num_prefill = num_prefill
        for server, call in itertools.product(self._servers, warm_up):
            server.warm_up(call, _WARM_UP)
        for replica in self._replicas.replicas:
            replica.is_ready = True

    def run(self, calls: Sequence[FleetCall]) -> list[FleetRecord]:
        """Runs every call to its end."""
        records = [FleetRecord(call) for call in calls]
        self._num_left = len(calls)
        self._at(0.0, self._check)
        for record in records:
            before_s = self._delays.before(record.call.num_prompt)
            self._at(record.call.at_s + before_s, partial(self._arrive, record))
        while self._num_left:
            busy = [s for s in self._servers if s.scheduler.has_work()]
            server = min(busy, key=lambda s: s.engine.now_s, default=None)
            due_s = self._events[0][0] if self._events else math.inf
            if server is not None and server.engine.now_s < due_s:
                self._step(server)
            else:
                at_s, _, act = heapq.heappop(self._events)
                act(at_s)
        return records

    def _at(self, at_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), act))

    def _check(self, now_s: float) -> None:
        """Does what the hop's checks do."""
        for replica, server in self._of.items():
            scheduler = server.scheduler
            replica.queue_s = ttft_s(scheduler, _request(1, now_s), 1, 0.0, 0)
            replica.sent_s = 0.0
            replica.num_checks += 1
            if self._way == "auto":
                replica.note_load(self._load(scheduler, replica.url), CHECK_S)
        is_busy = any(server.scheduler.has_work() for server in self._servers)
        self._num_idle = 0 if is_busy else self._num_idle + 1
        next_s = now_s + CHECK_S
        if self._num_idle > _IDLE_CHECKS and self._events:
            next_s = max(next_s, self._events[0][0])  # nothing changes until then
        self._at(next_s, self._check)

    def _load(self, scheduler: Scheduler, url: str) -> ServerLoad:
        found = forecast_load(scheduler, 0.0)
        prompts = tuple((n, s, n * self._hand_over.token_s) for n, s, _ in found.prompts)
        return ServerLoad(
            found.num_streams,
            found.slowdown,
            found.next_slowdown,
            found.prompt_s,
            found.steps,
            prompts,
            url,
            listens=True,
            pulls_from=frozenset(other.url for other in self._of if other.url != url),
        )

    # ---- calls

    def _arrive(self, record: FleetRecord, now_s: float) -> None:
        call = record.call
        number = next(self._numbers)
        blocks = call.num_prompt * _ID_BYTES // BLOCK_BYTES
        names = [b"%d %d" % (number, block) for block in range(blocks)]
        prompt = Prompt(names, call.num_prompt, True, True, call.num_output, True)
        if self._way == "apart":
            leg = _Leg(record, prompt, 1, gives_tokens=False)
            first = min(self._servers[: self._num_prefill], key=lambda s: len(s.legs))
            first.add(leg, call.num_prompt, now_s)
            return
        choice, following = self.parting.choose(prompt, (), now_s)
        assert choice is not None, "all servers are ready"
        choice.replica.num_calls += 1
        # one that may go on elsewhere is taken up again after its first token
        most = call.num_output if following is None else 1
        leg = _Leg(record, prompt, most, choice, following=following is not None)
        if following is not None and self.parting.is_soon(prompt, choice, following):
            leg.gives_tokens = False
            leg.then_at = self._replicas.take(following, names, 0.0)
            following.num_calls += 1
        self._of[choice.replica].add(leg, call.num_prompt, now_s)

    def _step(self, server: _Server) -> None:
        for sequence in server.engine.step(lambda step: self._watch(server, step)) or ():
            leg, now_s = server.ended(sequence), server.engine.now_s
            if len(leg.record.times) < leg.record.call.num_output:
                self._at(now_s, partial(self._go_on, server, leg))
                continue
            self._num_left -= 1
            if self._way != "apart":
                replica = self._replicas.replicas[server.number]
                replica.num_calls -= 1
                replica.num_streams -= 1
                self.parting.lengths.learn(leg.prompt, 0, len(leg.record.times))

    def _watch(self, server: _Server, step: Step) -> None:
        now_s = step.ended_s
        for sequence in step.sampled:
            leg = server.legs[sequence]
            if leg.gives_tokens:
                leg.record.times.append(now_s + self._delays.output_s)
        for sequence in step.firsts:
            leg = server.legs[sequence]
            replica = self._replicas.replicas[server.number]
            if leg.choice is not None and leg.moved_at_s is not None:
                self.parting.moved(leg.prompt, leg.choice, now_s - leg.moved_at_s)
            elif leg.choice is not None and leg.then_at is not None:
                self._replicas.note_end(leg.choice)
            elif leg.choice is not None:
                self._replicas.note_first(leg.choice, now_s - leg.record.call.at_s)
            leg.choice = leg.moved_at_s = None
            if self._way != "apart":
                replica.num_streams += 1

    def _go_on(self, server: _Server, leg: _Leg, now_s: float) -> None:
        """Goes on with a call whose prompt is computed."""
        call, had = leg.record.call, len(leg.record.times)
        then = _Leg(leg.record, leg.prompt, call.num_output - had, num_pulled=call.num_prompt)
        if self._way == "apart":
            others = self._servers[self._num_prefill :]
            target = min(others, key=lambda s: len(s.legs))
        else:
            here = self._replicas.replicas[server.number]
            here.num_calls -= 1
            here.num_streams -= 1
            if leg.then_at is not None:
                then.choice, following = leg.then_at, leg.then_at.replica
            else:
                following = self.parting.next_server(leg.prompt, here) or here
                following.num_calls += 1
                if following is not here:
                    then.choice = self._replicas.take(following, leg.prompt.names, 0.0)
            target = self._of[following]
        after_s = 0.0
        if target is not server:
            num_left = call.num_prompt
            if leg.then_at is not None:
                num_left = min(num_left, server.scheduler.limits.max_num_batched_tokens)
            after_s, then.moved_at_s = self._hand_over.seconds(num_left), now_s
        self._at(now_s + after_s, partial(target.add, then, 1))


def _request(num_tokens: int, now_s: float) -> Request:
    return Request("", None, (OTHER,) * num_tokens, SamplingParams(max_tokens=1), now_s)
