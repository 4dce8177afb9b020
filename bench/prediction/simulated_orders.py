"""Compares queue policies by the time to completion under a virtual clock.

The scheduler, queues, memory accounting, prefix cache and predictors are the real ones; steps take
the seconds of bench/simulate/memory_policy.py. A burst of the requests with fcfs finds the
capacity, and each order serves the same Poisson arrivals at shares of it, and bursts (gamma
arrivals of shape BURSTS) at 80 %.

    embedded    the embedded model's mixed requests with the hidden states that it really had; the
                predictors have seen the other half of its requests
    azure-conv  published lengths (8B on a GPU). No text is known, so the learned predictor is
                stood for by ones that know each length but for a log-normal error of ERRORS
    reasoning   the same machine; one of five answers has 500 to 4,000 tokens, the others 20 to 200

"gain" is the share of fcfs's mean that an order saves, "of oracle" the share of what srpt with
known lengths saves. "preempted" counts preemptions in 100 requests.

Run: python -m bench.prediction.simulated_orders [--quick]
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from math import exp
from multiprocessing import get_context
from statistics import NormalDist
from typing import Any

from bench.common import simulated
from bench.load.workload.arrivals import arrival_times
from bench.load.workload.published import AZURE_CONV, published_calls
from bench.prediction.recorded import Recorded, RecordedEngine, record
from bench.prediction.requests import halves
from bench.simulate.engine import OTHER, make_sequence
from bench.simulate.memory import make_kv
from bench.simulate.memory_policy import EMBEDDED, GPU, Machine
from memory.pages.layer_groups import LayerGroup
from memory.prefix.index import PrefixHasher
from serve.prediction.learned import LearnedPredictor
from serve.request import Request
from serve.sampling_params import SamplingParams
from serve.scheduler.admission import PredictedPolicy
from serve.scheduler.length_predictor import HistoryPredictor
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence as ServedSequence
from serve.scheduler.step_plan import SchedulerLimits
from serve.scheduler.waiting_queue import make_queue

SHARES = (0.6, 0.8, 0.95)
BURSTS = 0.1
ERRORS = (0.4, 0.8)
MAX_MODEL_LEN = 8192


@dataclass(frozen=True, slots=True)
class Setting:
    """A machine with `slots` sequences at most, and K/V memory for `contexts` whole contexts."""

    machine: Machine
    slots: int
    rows: int
    contexts: int
    max_model_len: int = MAX_MODEL_LEN


@dataclass(frozen=True, slots=True)
class Served:
    """A request: arrival_s is set by the load."""

    prompt: tuple[int, ...]
    num_output: int
    client: str | None = None
    recorded: Recorded | None = None
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds from arrival to the last token."""

    mean_s: float
    p50_s: float
    p99_s: float
    gain: float
    of_oracle: float
    preempted: float


class Known:
    """A LengthPredictor that knows each answer's length but for a log-normal error."""

    def __init__(self, error: float) -> None:
        self.error = error
        self.lengths: dict[str, int] = {}

    def quantile(self, request: Request, num_output: int, level: float) -> int:
        longest = request.params.max_tokens
        assert longest is not None, "resolved"
        score = random.Random(request.request_id).gauss(0.0, 1.0)
        score += NormalDist().inv_cdf(min(max(level, 0.001), 0.999))
        predicted = self.lengths[request.request_id] * exp(self.error * score)
        return min(max(int(predicted), num_output + 1), longest)

    def observe(self, request: Request, num_output: int) -> None:
        """Learns nothing."""

    def observe_cut(self, request: Request, num_output: int) -> None:
        """Learns nothing."""


class PromptOracle(Known):
    """Knows the length of each answer by its prompt."""

    def __init__(self, by_prompt: dict[tuple[int, ...], int]) -> None:
        super().__init__(0.0)
        self._by_prompt = by_prompt

    def quantile(self, request: Request, num_output: int, level: float) -> int:
        return max(num_output + 1, self._by_prompt[request.prompt_token_ids])


class Simulation:
    """Serves requests with one order and one predictor."""

    def __init__(self, setting: Setting, order: str, predictor: Any) -> None:
        machine, self.setting = setting.machine, setting
        whole = -(-setting.max_model_len * machine.token_bytes // machine.page_bytes)
        kv = make_kv(
            [LayerGroup(machine.token_bytes, machine.tile_tokens)],
            page_bytes=machine.page_bytes,
            num_pages=setting.contexts * whole,
            num_ranges=setting.slots,
            max_model_len=setting.max_model_len,
            max_rows=setting.rows,
        )
        self.predictor = predictor
        self.policy = PredictedPolicy(kv, setting.rows, predictor)
        limits = SchedulerLimits(setting.slots, setting.rows, setting.rows, None, 3.0)
        hasher = PrefixHasher(kv.page_end, b"orders")
        self.scheduler = Scheduler(limits, kv, self.policy, hasher, make_queue(order))
        self.engine = RecordedEngine(self.scheduler, machine)
        self.engine.states = {}
        self.num_added = 0

    def serve(self, requests: Sequence[Served]) -> list[float]:
        """Returns the seconds to completion of each request; arrival_s ascend from 0."""
        began_s, arrived = self.engine.now_s, 0
        finished: dict[ServedSequence, float] = {}
        sequences: list[ServedSequence] = []
        while arrived < len(requests) or self.scheduler.has_work():
            while arrived < len(requests):
                due_s = began_s + requests[arrived].arrival_s
                if due_s > self.engine.now_s:
                    break
                sequences.append(self._add(requests[arrived], due_s))
                arrived += 1
            ended = self.engine.step(self.engine.watch)
            if ended is None:
                self.engine.now_s = began_s + requests[arrived].arrival_s
                continue
            for sequence in ended:
                finished[sequence] = self.engine.now_s
                del self.engine.states[sequence]
        return [finished[s] - s.request.arrival_s for s in sequences]

    def _add(self, served: Served, due_s: float) -> ServedSequence:
        self.num_added += 1
        room = self.setting.max_model_len - len(served.prompt)
        params = SamplingParams(max_tokens=room, seed=0)
        name = str(self.num_added)
        if isinstance(self.predictor, Known):
            self.predictor.lengths[name] = served.num_output
        prompt = served.prompt
        if served.recorded is None:  # prompts share no prefix
            prompt = (self.num_added + OTHER, *prompt[1:])
        request = Request(name, None, prompt, params, due_s, served.client)
        sequence = make_sequence(request)
        sequence.page_keys = self.scheduler.prefixes.page_keys(request)
        self.engine.states[sequence] = served.recorded.sketches if served.recorded else {}
        self.engine.add(sequence, served.num_output)
        return sequence


def at_rate(
    requests: Sequence[Served], qps: float, seed: int, kind: str = "poisson"
) -> list[Served]:
    """Returns the requests with arrivals of this kind."""
    times = arrival_times(kind, qps, len(requests), seed)
    pairs = zip(requests, times, strict=True)
    return [replace(request, arrival_s=at_s - times[0]) for request, at_s in pairs]


def capacity(setting: Setting, learn: Sequence[Served], test: Sequence[Served]) -> float:
    """Returns the requests per second that end while enough of a burst is left to fill the slots:
    from a tenth to half of its time."""
    simulation = Simulation(setting, "fcfs", HistoryPredictor())
    simulation.serve(learn[:200])
    burst = [*test, *learn, *test]
    ended = sorted(simulation.serve(burst))
    from_s, to_s = 0.1 * ended[-1], 0.5 * ended[-1]
    return sum(from_s <= at_s < to_s for at_s in ended) / (to_s - from_s)


def compare(
    setting: Setting,
    cases: dict[str, tuple[str, Any]],
    learn: Sequence[Served],
    test: Sequence[Served],
) -> dict[str, dict[str, Result]]:
    """Returns a result for each share of the capacity and each of `cases`, which give an order and
    a function that makes a predictor."""
    most = capacity(setting, learn, test)
    tables = {}
    loads = [(share, "poisson") for share in SHARES] + [(0.8, f"gamma:{BURSTS}")]
    for share, kind in loads:
        times: dict[str, list[float]] = {}
        preempted = {}
        for name, (order, make_predictor) in cases.items():
            simulation = Simulation(setting, order, make_predictor())
            simulation.serve(at_rate(learn, 0.5 * most, 1))
            before = simulation.scheduler.num_preemptions
            times[name] = simulation.serve(at_rate(test, share * most, 2, kind))
            preempted[name] = 100 * (simulation.scheduler.num_preemptions - before) / len(test)
        arrivals = "" if kind == "poisson" else ", in bursts"
        load = f"{share:.0%} of {most:.1f} requests/s{arrivals}"
        tables[load] = results_of(times, preempted)
    return tables


def results_of(times: dict[str, list[float]], preempted: dict[str, float]) -> dict[str, Result]:
    """Returns a result for each case, from the seconds of its requests."""
    means = {name: statistics.fmean(values) for name, values in times.items()}
    gain_s = means["fcfs"] - means["srpt, oracle"]
    results = {}
    for name, values in times.items():
        ranked = sorted(values)
        p50, p99 = ranked[len(ranked) // 2], ranked[int(0.99 * (len(ranked) - 1))]
        share = (means["fcfs"] - means[name]) / gain_s if gain_s else 0.0
        gain = 1 - means[name] / means["fcfs"]
        results[name] = Result(means[name], p50, p99, gain, share, preempted[name])
    return results


def embedded_requests(count: int) -> tuple[list[Served], list[Served]]:
    """Returns recorded requests to learn from and to measure with, `count` at most of each."""
    parts = []
    for works in halves():
        recorded = record(works[:count])
        parts.append([Served(each.prompt, each.num_output, None, each) for each in recorded])
    return parts[0], parts[1]


def azure_requests(count: int) -> tuple[list[Served], list[Served]]:
    calls = published_calls(AZURE_CONV, 2 * count, 0)
    served = [
        Served((OTHER,) * min(call.num_prompt, 4096), min(call.num_output or 1, 4096), call.client)
        for call in calls
    ]
    return served[:count], served[count:]


def reasoning_requests(count: int, seed: int = 0) -> tuple[list[Served], list[Served]]:
    rng = random.Random(f"reasoning-{seed}")
    served = []
    for _ in range(2 * count):
        output = rng.randint(500, 4000) if rng.random() < 0.2 else rng.randint(20, 200)
        served.append(Served((OTHER,) * rng.randint(50, 500), output))
    return served[:count], served[count:]


COMMON: dict[str, tuple[str, Any]] = {
    "fcfs": ("fcfs", HistoryPredictor),
    "mlfq": ("mlfq", HistoryPredictor),
    "srpt, history": ("srpt", HistoryPredictor),
}
NOISY = COMMON | {
    **{f"srpt, error {e}": ("srpt", lambda e=e: Known(e)) for e in ERRORS},
    "srpt, oracle": ("srpt", lambda: Known(0.0)),
}


def run_embedded(slots: int, count: int) -> dict[str, dict[str, Result]]:
    learn, test = embedded_requests(count)
    lengths = {served.prompt: served.num_output for served in (*learn, *test)}
    cases = COMMON | {
        "srpt, learned": ("srpt", LearnedPredictor),
        "srpt, oracle": ("srpt", lambda: PromptOracle(lengths)),
    }
    return compare(Setting(EMBEDDED, slots, 256, slots, 1024), cases, learn, test)


def run_gpu(name: str, slots: int, contexts: int, count: int) -> dict[str, dict[str, Result]]:
    """Serves requests of a name in REQUESTS with so many slots, and memory for so many whole
    contexts."""
    learn, test = REQUESTS[name](count)
    return compare(Setting(GPU, slots, 2048, contexts), NOISY, learn, test)


REQUESTS = {"azure-conv": azure_requests, "reasoning": reasoning_requests}


def measure(is_quick: bool) -> dict[str, dict[str, Result]]:
    """Returns {setting and load: {order: result}}."""
    embedded, published = (60, 60) if is_quick else (968, 400)
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        jobs = {
            f"embedded, {slots} slots": pool.submit(run_embedded, slots, embedded)
            for slots in (4, 16)
        }
        for name in REQUESTS:
            jobs[f"{name}, 16 slots"] = pool.submit(run_gpu, name, 16, 16, published)
            jobs[f"{name}, memory of 4 contexts"] = pool.submit(run_gpu, name, 256, 4, published)
        return {
            f"{name}, {load}": results
            for name, job in jobs.items()
            for load, results in job.result().items()
        }


def show(name: str, results: dict[str, Result]) -> None:
    print(f"\n{name}")
    print(
        f"  {'order':16} {'mean':>8} {'p50':>8} {'p99':>8} {'gain':>7} {'of oracle':>9}"
        f" {'preempted':>9}"
    )
    for order, row in results.items():
        print(
            f"  {order:16} {row.mean_s:6.3f} s {row.p50_s:6.3f} s {row.p99_s:6.2f} s"
            f" {100 * row.gain:5.1f} % {100 * row.of_oracle:7.0f} % {row.preempted:9.1f}"
        )


if __name__ == "__main__":
    simulated.run(__doc__, measure, show)
