"""Who waits, who is next, and who must go when memory runs out. Numbers only, clock passed in.

    fcfs      first come, first served; the youngest goes
    priority  the lowest number first, first come within; nothing ages, so a stream of urgent
              requests can keep others waiting for ever
    mlfq      skip-join multi-level feedback (FastServe, arXiv 2305.05920): whoever has run for
              long gives way to those who have not
    fair      virtual token counter (arXiv 2401.00588): the client that was served least is next

An order decides about sequences only; how much fits and what is preempted when is the
scheduler's business. What a sequence that gave way had computed stays in the prefix cache or
goes to its store, so swapping is closing its range and opening it again with a hit.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from serve.request import Request
from serve.sequence import Sequence

ORDERS = ("fcfs", "priority", "mlfq", "fair")

Entry = tuple[int, int, Sequence]
"""(rank, number of arrival, sequence): sorted, the first is next."""


class Order:
    """First come, first served, and the base of the others: sorted by `rank`, then by arrival.

    Iterating gives the waiting sequences, the next one first. preempts: somebody who waits may
    outrank somebody who runs. Only `seconds_before` may be called from another thread.
    """

    preempts = False
    margin = 0  # ranks by which somebody who runs must be behind to give way

    def __init__(self) -> None:
        # of so many tokens, the second number of them known; whoever can tell sets it
        self.prefill_seconds: Callable[[int, int], float] = lambda num_tokens, num_cached: 0.0
        self.now_s = 0.0
        self._waiting: list[Entry] = []
        self._numbers: dict[Sequence, int] = {}
        self._num_arrived = 0

    def rank(self, sequence: Sequence) -> int:
        """A lower one goes first. It does not change while the sequence is in a queue."""
        return 0

    def rank_of(self, request: Request, num_rows: int) -> int:
        """That of a request that arrives with num_rows to compute."""
        return 0

    # ---- the scheduler's calls

    def tick(self, now_s: float) -> None:
        """A step begins."""
        self.now_s = now_s

    def add(self, sequence: Sequence) -> None:
        """It has arrived."""
        self._num_arrived += 1
        self._numbers[sequence] = self._num_arrived
        self._enqueue(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """It ran and was preempted. Its arrival counts, so it is before those who came later."""
        self._enqueue(sequence)

    def take(self, sequence: Sequence) -> None:
        """It is admitted: its range is open."""
        self._dequeue(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It ended while it waited."""
        self._dequeue(sequence)

    def ended(self, sequence: Sequence) -> None:
        """It is finished and not waiting."""
        del self._numbers[sequence]

    def victim(self, running: list[Sequence]) -> Sequence:
        """Who must go when memory runs out. running: in the order of their admission."""
        return max(reversed(running), key=self.rank)

    def outranked(self, sequence: Sequence, running: list[Sequence]) -> list[Sequence]:
        """Those of the running who give way to a waiting one, the first to go last."""
        if not self.preempts:
            return []
        rank = self.rank(sequence) + self.margin
        return sorted([s for s in running if self.rank(s) > rank], key=self.rank)

    def is_worth_a_swap(self, sequence: Sequence) -> bool:
        """Whether a running one may give way although its tokens must be computed again."""
        return True

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, _, sequence in self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def seconds_before(self, request: Request, num_rows: int) -> float:
        """To compute the prompts that wait and come before a request that arrives now with
        num_rows."""
        rank = self.rank_of(request, num_rows)
        return self._seconds([s for other, _, s in list(self._waiting) if other <= rank])

    def num_before(self, request: Request, num_rows: int) -> int:
        """Of the waiting, those that come before a request that arrives now with num_rows."""
        rank = self.rank_of(request, num_rows)
        return sum([other <= rank for other, _, _ in list(self._waiting)])

    def _seconds(self, sequences: list[Sequence]) -> float:
        """To compute their prompts; those that came before anything was known by their rows."""
        unknown = sum([s.num_expected_rows for s in sequences if not s.expected_s])
        known_s = sum([s.expected_s for s in sequences])
        return known_s + (self.prefill_seconds(unknown, 0) if unknown else 0.0)

    # ---- the queue

    def _enqueue(self, sequence: Sequence) -> None:
        insort(self._waiting, (self.rank(sequence), self._numbers[sequence], sequence))

    def _dequeue(self, sequence: Sequence) -> None:
        place = bisect_left(self._waiting, (self.rank(sequence), self._numbers[sequence]))
        assert self._waiting[place][2] is sequence, "not in the queue"
        del self._waiting[place]


class Priority(Order):
    """SamplingParams.priority; a running sequence gives way only if there is no other way."""

    preempts = True

    def rank(self, sequence: Sequence) -> int:
        return sequence.request.params.priority

    def rank_of(self, request: Request, num_rows: int) -> int:
        return request.params.priority


class _Job:
    """A sequence's level, how long it may stay there, and since when it has waited or run.

    earned: the level without starving, with which it outranks others while it waits.
    until_s: while it runs, when it is demoted; while it waits, when it starves.
    """

    __slots__ = ("earned", "left_s", "level", "since_s", "until_s")

    def __init__(self, level: int, left_s: float) -> None:
        self.level = self.earned = level
        self.left_s = left_s
        self.since_s = self.until_s = 0.0


class MultiLevelFeedback(Order):
    """Level p lasts BASE_S * 2^p seconds of running; the level is the rank.

    A request joins the first level that lasts for its prompt. Giving way costs a swap: it takes
    somebody who has run for more than 2^margin times as long, and where memory cannot keep what
    is set aside, for SWAP_SHARE times what computing it again costs. Whoever has waited for
    STARVING_S and STARVING_SHARE times what computing its tokens takes is next, before all who
    do not starve, and keeps level 0 for as long as it has waited.
    """

    preempts = True
    margin = 2
    BASE_S = 0.01
    STARVING_S = 3.0
    STARVING_SHARE = 30.0
    SWAP_SHARE = 10.0
    MAX_LEVEL = 24  # two days: there, everybody runs to the end

    def __init__(self) -> None:
        super().__init__()
        self._jobs: dict[Sequence, _Job] = {}
        self._running: set[Sequence] = set()
        # (when, number, sequence) of demotions and of starvation; some are out of date
        self._demotions: list[tuple[float, int, Sequence]] = []
        self._starving: list[tuple[float, int, Sequence]] = []

    def rank(self, sequence: Sequence) -> int:
        return self._jobs[sequence].level

    def rank_of(self, request: Request, num_rows: int) -> int:
        return self._join(len(request.prompt_token_ids), num_rows)

    def _join(self, num_tokens: int, num_rows: int) -> int:
        level, prefill_s = 0, self.prefill_seconds(num_tokens, num_tokens - num_rows)
        while level < self.MAX_LEVEL and self._quantum_s(level) < prefill_s:
            level += 1
        return level

    def _quantum_s(self, level: int) -> float:
        return self.BASE_S * (1 << level)

    def tick(self, now_s: float) -> None:
        self.now_s = now_s
        while self._demotions and self._demotions[0][0] <= now_s:
            until_s, _, sequence = heappop(self._demotions)
            if sequence in self._running and self._jobs[sequence].until_s == until_s:
                self._demote(sequence)
        while self._starving and self._starving[0][0] <= now_s:
            until_s, _, sequence = heappop(self._starving)
            job = self._jobs.get(sequence)
            if job is not None and sequence not in self._running and job.until_s == until_s:
                self._dequeue(sequence)
                job.level, job.left_s = 0, now_s - job.since_s
                insort(self._waiting, (0, self._numbers[sequence], sequence))

    def _demote(self, sequence: Sequence) -> None:
        job = self._jobs[sequence]
        while job.until_s <= self.now_s and job.level < self.MAX_LEVEL:
            job.level += 1
            job.until_s += self._quantum_s(job.level)
        if job.level < self.MAX_LEVEL:
            heappush(self._demotions, (job.until_s, self._numbers[sequence], sequence))

    def add(self, sequence: Sequence) -> None:
        level = self._join(sequence.num_tokens, sequence.num_expected_rows)
        self._jobs[sequence] = _Job(level, self._quantum_s(level))
        super().add(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        super()._enqueue(sequence)
        job = self._jobs[sequence]
        # the last step may have begun long before it arrived
        job.since_s = max(self.now_s, sequence.request.arrival_s)
        again_s = self.prefill_seconds(sequence.num_tokens, 0)
        job.until_s = job.since_s + self.STARVING_S + self.STARVING_SHARE * again_s
        heappush(self._starving, (job.until_s, self._numbers[sequence], sequence))
        if len(self._starving) > 2 * len(self._jobs) + 64:
            self._starving = [
                entry
                for entry in self._starving
                if entry[2] in self._jobs and self._jobs[entry[2]].until_s == entry[0]
            ]
            heapify(self._starving)

    def put_back(self, sequence: Sequence) -> None:
        self._running.discard(sequence)
        job = self._jobs[sequence]
        job.earned = job.level
        job.left_s = max(0.0, job.until_s - self.now_s)
        super().put_back(sequence)

    def take(self, sequence: Sequence) -> None:
        super().take(sequence)
        self._running.add(sequence)
        job = self._jobs[sequence]
        # What a preemption cost is not held against it.
        if sequence.num_preemptions:
            num_known = sequence.num_computed_tokens
            job.left_s += self.prefill_seconds(sequence.num_tokens, num_known)
        job.since_s = self.now_s
        job.until_s = self.now_s + job.left_s
        if job.level < self.MAX_LEVEL:
            heappush(self._demotions, (job.until_s, self._numbers[sequence], sequence))

    def outranked(self, sequence: Sequence, running: list[Sequence]) -> list[Sequence]:
        # Where everybody starves, throwing each other out would serve nobody.
        rank = self._jobs[sequence].earned + self.margin
        return sorted([s for s in running if self.rank(s) > rank], key=self.rank)

    def is_worth_a_swap(self, sequence: Sequence) -> bool:
        ran_s = self.now_s - self._jobs[sequence].since_s
        return ran_s >= self.SWAP_SHARE * self.prefill_seconds(sequence.num_tokens, 0)

    def ended(self, sequence: Sequence) -> None:
        super().ended(sequence)
        del self._jobs[sequence]
        self._running.discard(sequence)


class Fair(Order):
    """Tokens served per client, weighted; the client with the fewest is next.

    A client that begins to wait is lifted to the fewest of those who wait already, or to the last
    one that did: being away saves nothing. Prompts are charged on admission, once per request;
    outputs when somebody must be chosen. Between clients that both have work waiting the
    counters never differ by more than twice what a prompt or a full batch is worth.
    """

    INPUT_WEIGHT = 1
    OUTPUT_WEIGHT = 2
    MAX_CLIENTS = 10_000  # that are remembered while they have nothing to do

    def __init__(self) -> None:
        super().__init__()
        self.counters: dict[str | None, int] = {}
        self._queues: dict[str | None, list[tuple[int, Sequence]]] = {}
        self._num_waiting = 0
        self._charged: dict[Sequence, int] = {}  # output tokens of those who run
        self._is_settled = False
        self._last: str | None = None  # the last client that had nothing left waiting

    def tick(self, now_s: float) -> None:
        self.now_s = now_s
        self._is_settled = False

    def _settle(self) -> None:
        if not self._is_settled:
            self._is_settled = True
            for sequence in self._charged:
                self._charge(sequence)

    def _charge(self, sequence: Sequence) -> None:
        served = sequence.num_output_tokens
        new = served - self._charged[sequence]
        self._charged[sequence] = served
        self.counters[sequence.request.client] += self.OUTPUT_WEIGHT * new

    def add(self, sequence: Sequence) -> None:
        client = sequence.request.client
        if client not in self._queues:
            self._settle()
            self._lift(client)
        super().add(sequence)

    def _lift(self, client: str | None) -> None:
        if len(self.counters) >= self.MAX_CLIENTS:
            self._forget()
        if self._queues:
            least = min([self.counters[other] for other in self._queues])
        else:
            least = self.counters.get(self._last, 0)
        self.counters[client] = max(self.counters.get(client, 0), least)

    def _forget(self) -> None:
        """Idle clients go, the least served half: those would be lifted anyway."""
        busy = {self._last, *self._queues, *(s.request.client for s in self._charged)}
        idle = sorted(set(self.counters) - busy, key=lambda name: self.counters[name])
        for client in idle[: (len(idle) + 1) // 2]:
            del self.counters[client]

    def put_back(self, sequence: Sequence) -> None:
        self._charge(sequence)
        del self._charged[sequence]
        super().put_back(sequence)

    def take(self, sequence: Sequence) -> None:
        super().take(sequence)
        self._charged[sequence] = sequence.num_output_tokens
        if sequence.index == 0 and not sequence.num_preemptions:
            prompt = self.INPUT_WEIGHT * sequence.num_prompt_tokens
            self.counters[sequence.request.client] += prompt

    def ended(self, sequence: Sequence) -> None:
        super().ended(sequence)
        if sequence in self._charged:
            self._charge(sequence)
            del self._charged[sequence]

    def victim(self, running: list[Sequence]) -> Sequence:
        self._is_settled = False
        self._settle()
        return max(reversed(running), key=lambda s: self.counters[s.request.client])

    def __iter__(self) -> Iterator[Sequence]:
        if not self._queues:
            return
        self._settle()
        first = min(self._queues, key=self.counters.__getitem__)
        yield from [sequence for _, sequence in self._queues[first]]
        others = [client for client in self._queues if client != first]
        for client in sorted(others, key=self.counters.__getitem__):
            yield from [sequence for _, sequence in self._queues[client]]

    def __len__(self) -> int:
        return self._num_waiting

    def seconds_before(self, request: Request, num_rows: int) -> float:
        """Its client's own prompts, and of every other client's as many as fit into that share."""
        counters = dict(self.counters)
        prompts: dict[str | None, tuple[int, float]] = {}
        for client, queue in list(self._queues.items()):
            waiting = [s for _, s in list(queue)]
            rows = sum([s.num_expected_rows for s in waiting])
            prompts[client] = (rows, self._seconds(waiting))
        own_rows, seconds = prompts.pop(request.client, (0, 0.0))
        least = min([counters.get(client, 0) for client in prompts], default=0)
        counter = max(counters.get(request.client, 0), least)
        share = counter + self.INPUT_WEIGHT * (own_rows + num_rows)
        for client, (rows, all_s) in prompts.items():
            fitting = max(0, share - counters.get(client, 0)) // self.INPUT_WEIGHT
            seconds += all_s * min(1.0, fitting / max(1, rows))
        return seconds

    def num_before(self, request: Request, num_rows: int) -> int:
        """As if the clients that wait were served in turn, a request each."""
        queues = {client: len(queue) for client, queue in list(self._queues.items())}
        own = queues.pop(request.client, 0)
        return own + sum(min(number, own + 1) for number in queues.values())

    def _enqueue(self, sequence: Sequence) -> None:
        queue = self._queues.setdefault(sequence.request.client, [])
        insort(queue, (self._numbers[sequence], sequence))
        self._num_waiting += 1

    def _dequeue(self, sequence: Sequence) -> None:
        client = sequence.request.client
        queue = self._queues[client]
        place = bisect_left(queue, (self._numbers[sequence],))
        assert queue[place][1] is sequence, "not in the queue"
        del queue[place]
        self._num_waiting -= 1
        if not queue:
            del self._queues[client]
            self._last = client


def make_order(name: str) -> Order:
    """One of ORDERS (config.py checks the name)."""
    made = {"fcfs": Order, "priority": Priority, "mlfq": MultiLevelFeedback, "fair": Fair}
    return made[name]()
