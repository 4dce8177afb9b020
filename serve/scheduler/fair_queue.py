"""Fair queueing between clients by virtual token counters (arXiv 2401.00588)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from serve.request import Request
from serve.scheduler.sequence import Sequence
from serve.scheduler.waiting_queue import WaitingQueue


class FairQueue(WaitingQueue):
    """Counts the weighted tokens served per client; the client with the fewest is next.

    The counter of a client that begins to wait is lifted to the smallest of the waiting clients,
    or to that of the client that waited last, so an idle client saves up nothing. A prompt is
    charged on admission, once per request, as are the tokens of an answer that goes on here;
    outputs are charged when a client must be chosen.
    Between two clients that both have waiting work, the counters never differ by more than twice
    the charge of a prompt or a full batch.
    """

    INPUT_WEIGHT = 1
    OUTPUT_WEIGHT = 2
    MAX_CLIENTS = 10_000  # counters kept for idle clients, too

    def __init__(self) -> None:
        super().__init__()
        self.counters: dict[str | None, int] = {}
        self._queues: dict[str | None, list[tuple[int, Sequence]]] = {}
        self._num_waiting = 0
        self._charged: dict[Sequence, int] = {}  # output tokens of running sequences
        self._is_settled = False
        self._last: str | None = None  # the last client whose queue became empty

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
        """Drops the least served half of the idle clients, which would be lifted anyway."""
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
        if not sequence.num_preemptions:
            # an answer that another server has begun is computed as a prompt is
            tokens = sequence.num_output_tokens
            tokens += sequence.num_prompt_tokens if sequence.index == 0 else 0
            self.counters[sequence.request.client] += self.INPUT_WEIGHT * tokens

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
        """Returns the seconds of the client's own prompts, and of those of other clients that
        fit into the same share."""
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
        """Returns how many requests come first if clients are served one request in turn."""
        queues = {client: len(queue) for client, queue in list(self._queues.items())}
        own = queues.pop(request.client, 0)
        return own + sum(min(number, own + 1) for number in queues.values())

    def _enqueue(self, sequence: Sequence) -> None:
        queue = self._queues.setdefault(sequence.request.client, [])
        insort(queue, (self._arrivals[sequence], sequence))
        self._num_waiting += 1

    def _dequeue(self, sequence: Sequence) -> None:
        client = sequence.request.client
        queue = self._queues[client]
        index = bisect_left(queue, (self._arrivals[sequence],))
        assert queue[index][1] is sequence, "not in the queue"
        del queue[index]
        self._num_waiting -= 1
        if not queue:
            del self._queues[client]
            self._last = client
