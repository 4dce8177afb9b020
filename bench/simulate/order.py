"""Compares queue policies (`--order`) by latency and fairness under a simulated clock.

The scheduler, K/V manager, prefix cache and queue policies are the real ones. Step times are those
of the 1B model on 2 vCPUs in bench/simulate/memory_policy.py. All policies serve the same two
traces, whose lengths and rates are assumed, not measured:

    mixed    nine short questions (20-100 tokens, answers of 10-80, three clients, priority 0) for
             every long document (1,000-3,000 tokens, answers of 100-400, one client, priority 1),
             with Poisson arrivals at 90 % of what the machine can serve. At most 16 sequences
             run, with K/V for all of them ("roomy") or for two of the whole context ("tight")
    backlog  all requests arrive at the beginning, ten of one client for each of another

TTFT and latency count from arrival. "recomputed" is the share of rows that were computed again.
Fairness is the ratio of weighted tokens (prompt 1, answer 2) served to the two clients of the
backlog at the moment when one of them has no request waiting; 1 is fair.

Run: python -m bench.simulate.order [--quick]
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass

from bench.common import simulated
from bench.simulate.engine import OTHER, SimulatedEngine, Step, make_sequence
from bench.simulate.memory import make_kv
from bench.simulate.memory_policy import CPU
from memory.pages.layer_groups import LayerGroup
from memory.prefix.index import PrefixHasher
from serve.config import QUEUE_POLICIES
from serve.request import Request
from serve.sampling_params import SamplingParams
from serve.scheduler.admission import make_policy
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence
from serve.scheduler.step_plan import SchedulerLimits
from serve.scheduler.waiting_queue import make_queue

MAX_NUM_SEQS = 16
ROWS = 256
MAX_MODEL_LEN = 4096
LOAD = 0.9
NUM_REQUESTS = 600
NUM_BACKLOG = 440


@dataclass(frozen=True, slots=True)
class Call:
    """A request of a trace. Its answer ends with a stop token after num_output tokens."""

    arrival_s: float
    client: str
    num_prompt: int
    num_output: int
    priority: int

    @property
    def is_long(self) -> bool:
        return self.priority == 1


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of a queue policy: seconds, tokens per second, counts of preemptions by priority
    and for memory, and the share of recomputed rows. fairness is None until the backlog has run."""

    short_ttft_p50_s: float
    short_ttft_p99_s: float
    long_ttft_p99_s: float
    long_latency_p99_s: float
    tokens_per_s: float
    priority_preemptions: int
    preempted: int
    recomputed: float
    fairness: float | None = None


def mixed_trace(count: int, seed: int = 0) -> list[Call]:
    """Returns `count` calls of the trace "mixed"."""
    rng = random.Random(f"order-{seed}")
    requests: list[tuple[str, int, int, int]] = []
    for _ in range(count):
        if rng.random() < 0.1:
            requests.append(("batch", rng.randint(1000, 3000), rng.randint(100, 400), 1))
        else:
            client = rng.choice(("ann", "bob", "cat"))
            requests.append((client, rng.randint(20, 100), rng.randint(10, 80), 0))
    # seconds of each request in a full batch: prompts in whole steps, answers in decode steps of
    # MAX_NUM_SEQS rows
    work_s = [
        prompt * (CPU.row_s + CPU.fixed_s / ROWS + prompt / 2 * CPU.pair_s)
        + output * (CPU.row_s + CPU.fixed_s / MAX_NUM_SEQS + prompt * CPU.read_s)
        for _, prompt, output, _ in requests
    ]
    gap_s = sum(work_s) / len(requests) / LOAD
    calls, now_s = [], 0.0
    for call in requests:
        now_s += rng.expovariate(1 / gap_s)
        calls.append(Call(now_s, *call))
    return calls


def backlog_trace(count: int, seed: int = 0) -> list[Call]:
    """Returns `count` calls of the trace "backlog"."""
    rng = random.Random(f"order-{seed}")
    return [
        Call(0.0, "few" if i % 11 == 10 else "many", rng.randint(20, 200), rng.randint(10, 100), 0)
        for i in range(count)
    ]


class Simulation:
    """Simulates a trace with one queue policy and num_pages pages of K/V memory."""

    def __init__(self, calls: list[Call], order: str, num_pages: int) -> None:
        self.calls = calls
        self.kv = make_kv(
            [LayerGroup(CPU.token_bytes, CPU.tile_tokens)],
            page_bytes=CPU.page_bytes,
            num_pages=num_pages,
            num_ranges=MAX_NUM_SEQS,
            max_model_len=MAX_MODEL_LEN,
            max_rows=ROWS,
        )
        self.scheduler = Scheduler(
            SchedulerLimits(MAX_NUM_SEQS, ROWS, ROWS),
            self.kv,
            make_policy("predicted", self.kv, ROWS),
            PrefixHasher(self.kv.page_end, b"order"),
            make_queue(order),
        )
        self.engine = SimulatedEngine(self.scheduler, CPU)
        self.num_rows = 0
        self.first_token_s: dict[Sequence, float] = {}
        self.finished_s: dict[Sequence, float] = {}
        self.sequences: list[Sequence] = []

    def run(self) -> Result:
        while len(self.sequences) < len(self.calls) or self.scheduler.has_work():
            self._arrivals()
            if not self._step():
                self.engine.now_s = self.calls[len(self.sequences)].arrival_s
        return self._result()

    def fairness(self) -> float:
        """Returns the fairness of a backlog of two clients, of which "many" sent more requests."""
        self._arrivals()
        while len({s.request.client for s in self.scheduler.waiting}) == 2:
            self._step()
        served = dict.fromkeys(("many", "few"), 0)
        for sequence in self.sequences:
            if sequence.first_scheduled_s is not None:
                tokens = sequence.num_prompt_tokens + 2 * sequence.num_output_tokens
                served[sequence.request.client or ""] += tokens
        return served["many"] / served["few"]

    def _arrivals(self) -> None:
        while len(self.sequences) < len(self.calls):
            number = len(self.sequences)
            call = self.calls[number]
            if call.arrival_s > self.engine.now_s:
                return
            room = MAX_MODEL_LEN - call.num_prompt
            params = SamplingParams(max_tokens=room, seed=0, priority=call.priority)
            prompt = (number + 2, *(OTHER,) * (call.num_prompt - 1))  # prompts share no prefix
            request = Request(str(number), None, prompt, params, call.arrival_s, call.client)
            self.sequences.append(make_sequence(request))
            self.engine.add(self.sequences[-1], call.num_output)

    def _step(self) -> bool:
        finished = self.engine.step(self._watch)
        for sequence in finished or ():
            self.finished_s[sequence] = self.engine.now_s
        return finished is not None

    def _watch(self, step: Step) -> None:
        self.num_rows += step.work.num_rows
        for sequence in step.firsts:
            self.first_token_s[sequence] = step.ended_s

    def _result(self) -> Result:
        ttfts: dict[bool, list[float]] = {False: [], True: []}
        latencies: list[float] = []
        for call, sequence in zip(self.calls, self.sequences, strict=True):
            ttfts[call.is_long].append(self.first_token_s[sequence] - call.arrival_s)
            if call.is_long:
                latencies.append(self.finished_s[sequence] - call.arrival_s)
        needed = sum(call.num_prompt + call.num_output - 1 for call in self.calls)
        return Result(
            _quantile(ttfts[False], 0.5),
            _quantile(ttfts[False], 0.99),
            _quantile(ttfts[True], 0.99),
            _quantile(latencies, 0.99),
            sum(call.num_output for call in self.calls) / self.engine.now_s,
            self.scheduler.num_priority_preemptions,
            self.scheduler.num_preemptions - self.scheduler.num_priority_preemptions,
            self.num_rows / needed - 1,
        )


def _quantile(values: list[float], level: float) -> float:
    return sorted(values)[int(level * (len(values) - 1))]


def measure(quick: bool) -> dict[str, dict[str, Result]]:
    """Returns {"roomy" or "tight": {queue policy: result}}."""
    whole = -(-MAX_MODEL_LEN * CPU.token_bytes // CPU.page_bytes)
    calls = mixed_trace(NUM_REQUESTS // 10 if quick else NUM_REQUESTS)
    queue = backlog_trace(NUM_BACKLOG // 4 if quick else NUM_BACKLOG)
    fairness = {
        order: Simulation(queue, order, MAX_NUM_SEQS * whole).fairness() for order in QUEUE_POLICIES
    }
    results: dict[str, dict[str, Result]] = {}
    for name, num_pages in (("roomy", MAX_NUM_SEQS * whole), ("tight", 2 * whole)):
        results[name] = {
            order: Simulation(calls, order, num_pages).run() for order in QUEUE_POLICIES
        }
    return {
        name: {
            order: Result(**(asdict(result) | {"fairness": fairness[order]}))
            for order, result in by_order.items()
        }
        for name, by_order in results.items()
    }


def _show(name: str, results: dict[str, Result]) -> None:
    print(f"\nmixed, {name} memory")
    print(
        f"  {'order':9} {'short TTFT p50':>14} {'p99':>8} {'long TTFT p99':>14}"
        f" {'latency p99':>12} {'tokens/s':>9} {'priority':>9} {'preempted':>9}"
        f" {'recomputed':>10} {'fairness':>8}"
    )
    for order, r in results.items():
        print(
            f"  {order:9} {r.short_ttft_p50_s:12.2f} s {r.short_ttft_p99_s:6.2f} s"
            f" {r.long_ttft_p99_s:12.2f} s {r.long_latency_p99_s:10.1f} s {r.tokens_per_s:9.1f}"
            f" {r.priority_preemptions:9} {r.preempted:9} {100 * r.recomputed:8.1f} %"
            f" {r.fairness:8.2f}"
        )


if __name__ == "__main__":
    simulated.run(__doc__, measure, _show)
