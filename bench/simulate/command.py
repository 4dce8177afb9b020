"""`serve bench --simulate`: turns options into simulated runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from bench.load.client.record import OfferOnce, RunResult
from bench.load.report.live import LiveView
from bench.load.workload.online_options import OnlineOptions
from bench.load.workload.schedule import ArrivalSettings, make_calls
from bench.load.workload.work import Call
from bench.simulate.load import OnProgress, simulate
from bench.simulate.machine import SimulatedMachine, simulated_machine
from serve.errors import ConfigError

ASSUMED_OUTPUT = 128
_NOT_SIMULATED = (
    "grace_s",
    "max_concurrency",
    "cancel_rate",
    "cancel_after_s",
    "cancel_after_chunks",
    "probe_qps",
    "processes",
)


def simulated(options: OnlineOptions) -> OfferOnce:
    """Returns a function that offers one rate with one seed and a number of requests. None stands
    for the rate of the arrivals and for the number in the options. Raises ConfigError for options
    that a simulation does not have, and as bench.simulate.machine does."""
    for name in _NOT_SIMULATED:
        if getattr(options, name):
            raise ConfigError(f"{name} cannot be simulated")
    machine = simulated_machine(options.model, options.machine, options.engine)
    dataset = options.dataset_settings
    dataset = replace(dataset, max_model_len=machine.settings.max_model_len)
    arrival = ArrivalSettings(options.arrival, options.speedup)
    console = Console(stderr=True)

    def once(rate: float | None, seed: int, requests: int | None = None) -> RunResult:
        offered = make_calls(
            dataset,
            arrival,
            qps=rate,
            requests=options.requests if requests is None else requests,
            duration_s=options.duration,
            seed=seed,
        )
        title = f"{options.model} on {machine.name}, simulated"
        with LiveView(console, total=len(offered.calls), qps=offered.qps, title=title) as view:
            result = simulate_load(
                offered.calls,
                machine,
                qps=offered.qps,
                seed=seed,
                warmup_s=options.warmup_s,
                on_progress=view.update,
            )
        result.target = title
        result.notes += offered.notes
        return result

    return once


def simulate_load(
    calls: Sequence[Call],
    machine: SimulatedMachine,
    *,
    qps: float,
    seed: int = 0,
    warmup_s: float = 0.0,
    on_progress: OnProgress | None = None,
) -> RunResult:
    """Simulates calls at their times (at_s). An answer whose length the model would decide has the
    smaller of max_tokens and ASSUMED_OUTPUT tokens. The result's notes state all assumptions."""
    with_lengths = [
        call
        if call.num_output is not None
        else replace(call, num_output=min(call.max_tokens or ASSUMED_OUTPUT, ASSUMED_OUTPUT))
        for call in calls
    ]
    result = simulate(
        with_lengths,
        [call.at_s or 0.0 for call in calls],
        machine.cost,
        machine.settings,
        qps=qps,
        seed=seed,
        warmup_s=warmup_s,
        on_progress=on_progress,
    )
    result.notes.extend(machine.notes)
    num_assumed = sum(call.num_output is None for call in calls)
    if num_assumed:
        result.notes.append(
            f"{num_assumed} answers, whose length the model would decide, are assumed to have"
            f" {ASSUMED_OUTPUT} tokens"
        )
    return result
