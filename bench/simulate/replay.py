"""Measures the speed of the simulator.

The requests have Azure-Conv's published lengths and Poisson arrivals. The engine has its default
settings and serves llama-3.1-8b (int8) on one H100, by default at about 90 % of the highest stable
rate (36 requests/s).

Run: python -m bench.simulate.replay [--requests 1000000] [--qps 32.5]
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import time
from dataclasses import asdict, dataclass

from bench.load.client.record import Outcome, RunResult
from bench.load.workload.datasets import DatasetSettings
from bench.load.workload.schedule import ArrivalSettings, make_calls
from bench.simulate.command import simulate_load
from bench.simulate.machine import DEFAULT_MACHINE, simulated_machine

MODEL = "llama-3.1-8b"
DATASET = "azure-conv"
MAX_MODEL_LEN = 16_384


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a replay. prompt and output are mean tokens, running is the mean number of
    running sequences, and simulated_h are simulated hours, as TTFT and TPOT are simulated."""

    requests: int
    answered: int
    prompt: float
    output: float
    qps: float
    wall_s: float
    simulated_h: float
    running: float
    ttft_p50_s: float
    tpot_p50_s: float
    peak_rss_gib: float


def replay(requests: int, qps: float, seed: int = 0) -> tuple[Figures, RunResult]:
    """Simulates the load once. Returns its figures and the run."""
    engine = {"max_model_len": MAX_MODEL_LEN}
    machine = simulated_machine(MODEL, DEFAULT_MACHINE, engine)
    dataset = DatasetSettings(DATASET, max_model_len=MAX_MODEL_LEN)
    calls = make_calls(dataset, ArrivalSettings(), qps=qps, requests=requests, seed=seed).calls
    began = time.perf_counter()
    result = simulate_load(calls, machine, qps=qps, seed=seed)
    wall_s = time.perf_counter() - began
    good = [record for record in result.records if record.outcome is Outcome.OK]
    tpots = [
        (r.finished_s - r.chunks_s[0]) / (r.output_tokens - 1)
        for r in good
        if r.output_tokens is not None and r.output_tokens > 1
    ]
    figures = Figures(
        requests=requests,
        answered=len(good),
        prompt=statistics.fmean(call.num_prompt for call in calls),
        output=statistics.fmean(r.output_tokens or 0 for r in good),
        qps=qps,
        wall_s=wall_s,
        simulated_h=result.window[1] / 3600,
        running=statistics.fmean(step.num_running for step in result.steps),
        ttft_p50_s=statistics.median(r.chunks_s[0] - r.scheduled_s for r in good),
        tpot_p50_s=statistics.median(tpots),
        peak_rss_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20),
    )
    return figures, result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--qps", type=float, default=32.5)
    args = parser.parse_args()
    print(f"machine: {platform.processor() or platform.machine()}, {platform.python_version()}")
    figures, result = replay(args.requests, args.qps)
    print("\n".join(result.notes))
    print(
        f"{figures.requests} requests ({figures.prompt:.1f} and {figures.output:.1f} tokens) at"
        f" {figures.qps:g}/s: {figures.wall_s:.1f} s for {figures.simulated_h:.2f} simulated hours,"
        f" {figures.running:.0f} running; peak {figures.peak_rss_gib:.2f} GiB"
    )
    print(json.dumps(asdict(figures)))


if __name__ == "__main__":
    main()
