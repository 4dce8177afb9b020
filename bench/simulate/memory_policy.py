"""Finds how many requests per second a fixed K/V memory serves with each admission policy.

All policies serve the same traces in one run, with the real scheduler, K/V manager and policies;
only time and the memory's system calls are simulated. The memory holds two sequences of the whole
context. For each policy a bisection finds the highest rate that meets two conditions. The 99th
percentile of the time per output token is at most the time of a step of 256 rows, the largest step,
whose prompt rows are in the middle of the context. The queue is stable: the 90th percentile of the
time to first token is below five times the time that an average request takes alone.

The row "unlimited" has memory for all requests and shows what compute alone allows. If that is less
than 2.5 times the rate of "worst_case", no policy can reach 2.5 times.

A step takes fixed + rows * row + (tokens that decode rows attend to) * read + (pairs of a prompt
row and a token before it) * pair. The coefficients, in seconds:

    1B on 2 vCPUs   fitted by hand to measured decode and prefill, within 20 % (November 2026, 2
                    vCPUs of an AMD EPYC Zen 5)
    8B on a GPU     not measured: int8 weights at 80 % of 4.8 TB/s, 0.8 ms of launches, and 50 % of
                    1,979 TOP/s and 989 TFLOP/s (data sheet of an H200)
    embedded model  2 ms for a step of 32 rows

Run: python -m bench.simulate.memory_policy [--quick]
"""

from __future__ import annotations

import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

from bench.common import simulated
from bench.load.workload.arrivals import arrival_times
from bench.load.workload.mixed import mixed_requests
from bench.load.workload.published import (
    AZURE_CODE,
    AZURE_CONV,
    KIMI_CONV,
    Published,
    published_calls,
    with_max_tokens,
)
from bench.load.workload.work import Call
from bench.simulate.engine import OTHER, SimulatedEngine, Step, make_sequence
from bench.simulate.memory import make_kv
from memory.kv_manager import KVManager
from memory.pages.layer_groups import LayerGroup
from serve.request import Request
from serve.sampling_params import SamplingParams
from serve.scheduler.admission import OraclePolicy, PredictedPolicy, make_policy
from serve.scheduler.length_predictor import Coverage
from serve.scheduler.memory_policy import MemoryPolicy
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence
from serve.scheduler.step_plan import SchedulerLimits
from serve.scheduler.step_time import StepWork

POLICIES = ("unlimited", "oracle", "predicted", "worst_case", "prompt_only")
MAX_NUM_SEQS = 256
ROWS = 256
WARM_UP = 0.1  # share of the requests that the figures leave out
RESOLUTION = 1.01


@dataclass(frozen=True, slots=True)
class Machine:
    """The coefficients of a step's time, and the layout of K/V as serve/loading/kv_sizing.py sizes
    it."""

    name: str
    fixed_s: float
    row_s: float
    read_s: float
    pair_s: float
    token_bytes: int
    page_bytes: int
    tile_tokens: int = 16

    def seconds(self, work: StepWork) -> float:
        """Returns the seconds of a step, as a StepCost does."""
        work_s = work.num_rows * self.row_s + work.num_context * self.read_s
        return self.fixed_s + work_s + work.num_pairs * self.pair_s

    def alone_s(self, num_prompt: float, num_output: float) -> float:
        """Returns the seconds of a request that runs alone."""
        prefill = num_prompt * (self.row_s + self.fixed_s / ROWS + num_prompt / 2 * self.pair_s)
        return prefill + num_output * (self.fixed_s + self.row_s + num_prompt * self.read_s)


CPU = Machine("1B on 2 vCPUs", 27e-3, 1.2e-3, 5.6e-7, 2.6e-7, 16_896, 512 << 10)
GPU = Machine("8B on a GPU", 2.9e-3, 1.6e-5, 1.7e-8, 1.1e-9, 69_632, 2 << 20)
EMBEDDED = Machine("embedded model", 1.2e-3, 2.5e-5, 4e-8, 2e-8, 1_320, 64 << 10)


@dataclass(frozen=True, slots=True)
class Case:
    """A trace on a machine. trace None is the trace of the embedded model's requests."""

    name: str
    machine: Machine
    trace: Published | None
    max_model_len: int
    num_requests: int


CASES = (
    Case("azure-conv", GPU, AZURE_CONV, 8192, 1500),
    Case("azure-code", GPU, AZURE_CODE, 8192, 1500),
    Case("kimi-conv", GPU, KIMI_CONV, 131_072, 600),
    Case("azure-conv", CPU, AZURE_CONV, 8192, 1000),
    Case("mixed requests", EMBEDDED, None, 1024, 3000),
)
QUICK = (replace(CASES[0], num_requests=150), replace(CASES[4], num_requests=300))


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of a simulation. is_ok means that it meets both conditions. utilisation is the
    share of the pages in use, and waste is the share of those pages' bytes without a token."""

    qps: float
    is_ok: bool
    tpot_p99_s: float = 0.0
    ttft_p90_s: float = 0.0
    preempted: float = 0.0
    preemptions_per_1000: float = 0.0
    utilisation: float = 0.0
    waste: float = 0.0
    mean_running: float = 0.0
    coverage_p50: float | None = None
    coverage_p90: float | None = None


class Simulation:
    """Simulates a trace with one policy at one rate."""

    def __init__(self, case: Case, calls: list[Call], policy: str, qps: float) -> None:
        self.case, self.calls, self.qps = case, calls, qps
        machine = case.machine
        self.kv = self._kv(policy)
        self.lengths: dict[str, int] = {}
        admission: MemoryPolicy
        if policy == "oracle":
            admission = OraclePolicy(self.kv, lambda s: self.lengths[s.request.request_id], ROWS)
        else:
            name = "prompt_only" if policy == "unlimited" else policy
            admission = make_policy(name, self.kv, ROWS)
        self.scheduler = Scheduler(SchedulerLimits(MAX_NUM_SEQS, ROWS, ROWS), self.kv, admission)
        self.engine = SimulatedEngine(self.scheduler, machine)
        prompt = statistics.fmean(call.num_prompt for call in calls)
        output = statistics.fmean(_num_generated(call) for call in calls)
        self.ttft_bound_s = 5 * machine.alone_s(prompt, output)
        middle = case.max_model_len // 2
        self.tpot_bound_s = machine.fixed_s + ROWS * (machine.row_s + middle * machine.pair_s)
        self.first_token_s: dict[str, float] = {}
        self.tpots: list[float] = []
        self.ttfts: list[float] = []
        self.num_preempted = self.num_counted = 0
        self.used_tokens = self.used_pages = self.running = 0.0

    def _kv(self, policy: str) -> KVManager:
        machine, length = self.case.machine, self.case.max_model_len
        sequences = MAX_NUM_SEQS if policy == "unlimited" else 2
        return make_kv(
            [LayerGroup(machine.token_bytes, machine.tile_tokens)],
            page_bytes=machine.page_bytes,
            num_pages=sequences * -(-length * machine.token_bytes // machine.page_bytes),
            num_ranges=MAX_NUM_SEQS,
            max_model_len=length,
            max_rows=ROWS,
        )

    def run(self) -> Result:
        scheduler, engine, calls = self.scheduler, self.engine, self.calls
        # the gaps scale with the rate, and the first request arrives at once
        due = arrival_times("poisson", self.qps, len(calls), seed=0)
        arrival_s = [at_s - due[0] for at_s in due]
        arrived = 0
        policy = scheduler.policy
        # in a longer queue, any new request waits for longer than the bound
        most_waiting = max(64, int(4 * self.qps * self.ttft_bound_s))
        while arrived < len(calls) or scheduler.has_work():
            while arrived < len(calls) and arrival_s[arrived] <= engine.now_s:
                self._add(arrived, arrival_s[arrived])
                arrived += 1
                if arrived == int(WARM_UP * len(calls)) and isinstance(policy, PredictedPolicy):
                    policy.coverages = Coverage(0.5), Coverage(0.9)
            if len(scheduler.waiting) > most_waiting:
                return Result(self.qps, is_ok=False)
            finished = engine.step(self._watch)
            if finished is None:
                engine.now_s = arrival_s[arrived]
                continue
            for sequence in finished:
                self._count(sequence)
        return self._result()

    def _add(self, number: int, now_s: float) -> None:
        call = self.calls[number]
        name = str(number)
        assert call.num_output is not None, "every call of this load has a length"
        params = SamplingParams(max_tokens=call.max_tokens, seed=0)
        request = Request(name, None, (OTHER,) * call.num_prompt, params, now_s, call.client)
        self.lengths[name] = _num_generated(call)
        self.engine.add(make_sequence(request), call.num_output)

    def _watch(self, step: Step) -> None:
        for sequence in step.firsts:
            self.first_token_s[sequence.request.request_id] = step.ended_s
        running = self.scheduler.running
        self.used_pages += step.seconds * self.kv.num_in_use
        self.running += step.seconds * len(running)
        self.used_tokens += step.seconds * sum([s.num_computed_tokens + 1 for s in running])

    def _count(self, sequence: Sequence) -> None:
        name = sequence.request.request_id
        if int(name) < WARM_UP * len(self.calls):
            return
        self.num_counted += 1
        self.num_preempted += sequence.num_preemptions > 0
        first_s = self.first_token_s[name]
        self.ttfts.append(first_s - sequence.request.arrival_s)
        if sequence.num_output_tokens > 1:
            self.tpots.append((self.engine.now_s - first_s) / (sequence.num_output_tokens - 1))

    def _result(self) -> Result:
        machine = self.case.machine
        tpot, ttft = _quantile(self.tpots, 0.99), _quantile(self.ttfts, 0.9)
        coverage = self.scheduler.policy.coverage()
        total = self.kv.num_pages * self.engine.now_s
        return Result(
            self.qps,
            tpot <= self.tpot_bound_s and ttft <= self.ttft_bound_s,
            tpot,
            ttft,
            self.num_preempted / self.num_counted,
            1000 * self.scheduler.num_preemptions / self.scheduler.num_finished,
            self.used_pages / total,
            1 - self.used_tokens * machine.token_bytes / (self.used_pages * machine.page_bytes),
            self.running / self.engine.now_s,
            *coverage,
        )


def _num_generated(call: Call) -> int:
    assert call.num_output is not None and call.max_tokens is not None
    return min(call.num_output, call.max_tokens)


def _quantile(values: list[float], level: float) -> float:
    return sorted(values)[int(level * (len(values) - 1))]


def highest_qps(case: Case, calls: list[Call], policy: str) -> Result:
    """Returns the result at the highest rate that meets both conditions. The bisection begins 20 %
    above the rate that compute alone allows when MAX_NUM_SEQS requests share each step."""
    prompt = statistics.fmean(call.num_prompt for call in calls)
    output = statistics.fmean(_num_generated(call) for call in calls)
    machine = case.machine
    full_batch = replace(machine, fixed_s=machine.fixed_s / MAX_NUM_SEQS)
    high = 1.2 / full_batch.alone_s(prompt, output)
    best = Result(0.0, is_ok=False)
    low = high / 64
    while high / low > RESOLUTION:
        result = Simulation(case, calls, policy, (low * high) ** 0.5).run()
        if result.is_ok:
            best, low = result, result.qps
        else:
            high = result.qps
    return best


def published_trace(trace: Published, count: int, max_model_len: int) -> list[Call]:
    """Returns requests with the lengths, clients and max_tokens of a published trace.
    bench/load/workload/published.py says which of these are known and which are assumed."""
    return _bounded(published_calls(trace, count, 0), max_model_len)


def embedded_trace(count: int, max_model_len: int, seed: int = 0) -> list[Call]:
    """Returns the embedded model's mixed requests with the lengths of its greedy answers, which
    this function computes, and with max_tokens as in a published trace."""
    from serve import LLM, SamplingParams

    params = SamplingParams(max_tokens=None, temperature=0.0)
    with LLM(max_model_len=max_model_len) as llm:
        outputs = llm.chat(mixed_requests(seed, count), params, use_tqdm=False)
    calls = with_max_tokens(
        [0] * len(outputs),
        [len(output.prompt_token_ids) for output in outputs],
        [len(output.outputs[0].token_ids) for output in outputs],
    )
    return _bounded(calls, max_model_len)


def _bounded(calls: list[Call], max_model_len: int) -> list[Call]:
    """Limits prompts to half of the context and answers to the rest. A request without max_tokens
    may fill the context."""
    bounded = []
    for call in calls:
        assert call.num_output is not None
        prompt = min(call.num_prompt, max_model_len // 2)
        room = max_model_len - prompt
        max_tokens = room if call.max_tokens is None else min(call.max_tokens, room)
        output = min(call.num_output, room)
        bounded.append(Call(prompt, output, max_tokens, client=call.client))
    return bounded


def _trace(case: Case) -> list[Call]:
    if case.trace is None:
        return embedded_trace(case.num_requests, case.max_model_len)
    return published_trace(case.trace, case.num_requests, case.max_model_len)


def measure(is_quick: bool) -> dict[str, dict[str, Result]]:
    """Returns {case: {policy: result at its highest rate}}, computed in two processes."""
    cases = QUICK if is_quick else CASES
    traces = [_trace(case) for case in cases]
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        jobs = {
            (case, policy): pool.submit(highest_qps, case, calls, policy)
            for case, calls in zip(cases, traces, strict=True)
            for policy in POLICIES
        }
        return {
            f"{case.name}, {case.machine.name}": {
                policy: jobs[case, policy].result() for policy in POLICIES
            }
            for case in cases
        }


def verdicts(results: dict[str, Result]) -> dict[str, tuple[float | None, bool]]:
    """Returns {target: (figure, whether it reaches the target)} of the policy "predicted"."""
    predicted, oracle, worst = (results[name] for name in ("predicted", "oracle", "worst_case"))
    over_worst, of_oracle = predicted.qps / worst.qps, predicted.qps / oracle.qps
    p90 = predicted.coverage_p90
    return {
        "QPS over worst_case >= 2.5": (over_worst, over_worst >= 2.5),
        "QPS over oracle >= 0.95": (of_oracle, of_oracle >= 0.95),
        "preempted < 1 %": (100 * predicted.preempted, predicted.preempted < 0.01),
        "P90 coverage 87-93 %": (p90 and 100 * p90, p90 is not None and 0.87 <= p90 <= 0.93),
    }


def _show(name: str, results: dict[str, Result]) -> None:
    print(f"\n{name}")
    print(
        f"  {'policy':12} {'QPS':>8} {'of oracle':>9} {'TPOT p99':>9} {'TTFT p90':>9}"
        f" {'running':>8} {'memory':>7} {'waste':>6} {'preempted':>9} {'P50':>6} {'P90':>6}"
    )
    for policy, r in results.items():
        coverage = [
            "" if c is None else f"{100 * c:.1f} %" for c in (r.coverage_p50, r.coverage_p90)
        ]
        print(
            f"  {policy:12} {r.qps:8.3f} {r.qps / results['oracle'].qps:9.3f}"
            f" {1e3 * r.tpot_p99_s:6.1f} ms {r.ttft_p90_s:7.2f} s {r.mean_running:8.1f}"
            f" {100 * r.utilisation:5.1f} % {100 * r.waste:4.1f} % {100 * r.preempted:7.2f} %"
            f" {coverage[0]:>6} {coverage[1]:>6}"
        )
    for text, (figure, is_reached) in verdicts(results).items():
        number = "none" if figure is None else f"{figure:.2f}"
        print(f"  predicted: {text}: {number} {'' if is_reached else 'NOT REACHED'}")


if __name__ == "__main__":
    simulated.run(__doc__, measure, _show)
