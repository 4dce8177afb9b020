"""Compares memory policies (with the queue policy fcfs) and queue policies (with the memory policy
"predicted") on many requests.

The requests have Azure-Conv's published lengths, its 24 clients and Poisson arrivals. llama-3.1-8b
(int8) runs on one H100 whose K/V memory is too small for all sequences.

Run: python -m bench.simulate.policies [--requests 100000] [--qps 28] [--kv-gib 6]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context

from bench.load.client.record import Outcome
from bench.load.workload.datasets import DatasetSettings
from bench.load.workload.schedule import ArrivalSettings, make_calls
from bench.simulate.load import LoadSimulation
from bench.simulate.machine import DEFAULT_MACHINE, simulated_machine
from serve.config import MEMORY_POLICIES, QUEUE_POLICIES

MODEL, DATASET, MAX_MODEL_LEN = "llama-3.1-8b", "azure-conv", 16_384
CASES = [
    *((policy, "fcfs") for policy in MEMORY_POLICIES),
    *(("predicted", name) for name in QUEUE_POLICIES[1:]),
]


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one case. answered is the share of the requests that succeed, memory the mean
    share of the pages in use, preempted the share of the answers that were preempted."""

    policy: str
    order: str
    answered: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    running: float
    memory: float
    preempted: float
    wall_s: float


def run(policy: str, order: str, requests: int, qps: float, kv_bytes: int) -> Result:
    """Simulates the load with one memory policy and one queue policy."""
    engine = {
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache_bytes": kv_bytes,
        "memory_policy": policy,
        "order": order,
    }
    machine = simulated_machine(MODEL, DEFAULT_MACHINE, engine)
    dataset = DatasetSettings(DATASET, max_model_len=MAX_MODEL_LEN)
    calls = make_calls(dataset, ArrivalSettings(), qps=qps, requests=requests).calls
    began = time.perf_counter()
    arrivals_s = [call.at_s or 0.0 for call in calls]
    load = LoadSimulation(calls, arrivals_s, machine.cost, machine.settings)
    load.run()
    result = load.result(qps, 0)
    good = [record for record in result.records if record.outcome is Outcome.OK]
    ttfts = sorted(record.chunks_s[0] - record.scheduled_s for record in good)
    tpots = sorted(
        (record.chunks_s[-1] - record.chunks_s[0]) / (record.output_tokens - 1)
        for record in good
        if record.output_tokens is not None and record.output_tokens > 1
    )
    steps = result.steps
    pages = kv_bytes // (machine.settings.engine.kv_page_bytes or 1)
    return Result(
        policy=policy,
        order=order,
        answered=len(good) / len(calls),
        ttft_p50_s=ttfts[len(ttfts) // 2],
        ttft_p99_s=ttfts[int(0.99 * len(ttfts))],
        tpot_p50_s=tpots[len(tpots) // 2],
        tpot_p99_s=tpots[int(0.99 * len(tpots))],
        running=sum(step.num_running for step in steps) / len(steps),
        memory=sum(step.pages_in_use for step in steps) / len(steps) / pages,
        preempted=load.num_preempted / len(good),
        wall_s=time.perf_counter() - began,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--qps", type=float, default=28.0)
    parser.add_argument("--kv-gib", type=float, default=6.0)
    args = parser.parse_args()
    print(f"machine: {platform.processor() or platform.machine()}, {platform.python_version()}")
    load = (args.requests, args.qps, int(args.kv_gib * (1 << 30)))
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        results = [job.result() for job in [pool.submit(run, *case, *load) for case in CASES]]
    print(
        f"{'policy':12} {'order':9} {'answered':>8} {'TTFT p50':>9} {'p99':>9} {'TPOT p50':>9}"
        f" {'p99':>9} {'running':>8} {'memory':>7} {'preempted':>9} {'took':>7}"
    )
    for r in results:
        print(
            f"{r.policy:12} {r.order:9} {100 * r.answered:6.1f} % {r.ttft_p50_s:7.2f} s"
            f" {r.ttft_p99_s:7.2f} s {1e3 * r.tpot_p50_s:6.1f} ms {1e3 * r.tpot_p99_s:6.1f} ms"
            f" {r.running:8.1f} {100 * r.memory:5.1f} % {100 * r.preempted:7.2f} %"
            f" {r.wall_s:5.0f} s"
        )
    print(json.dumps([asdict(result) for result in results]))


if __name__ == "__main__":
    main()
