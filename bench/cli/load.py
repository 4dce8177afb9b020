"""The load test of `serve bench`: turns its options into runs, and the runs into a report."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from bench.load.client.record import OfferOnce, RunResult
from bench.load.client.redact import command_line
from bench.load.client.run import offer
from bench.load.client.targets import EngineTarget, ServerSettings, ServerTarget, Target
from bench.load.report.live import LiveView
from bench.load.report.report import check_files, report
from bench.load.results.search import ENDINGS, SearchResult, ending, find_max_qps
from bench.load.results.slo import Slo, parse_slo
from bench.load.workload.arrivals import DEFAULT_REQUESTS
from bench.load.workload.datasets import DatasetSettings
from bench.load.workload.online_options import OnlineOptions
from bench.load.workload.schedule import ArrivalSettings, make_schedule, make_warm_up
from serve.cli.client_key import read_client_key
from serve.cli.model_files import find_model
from serve.config import DEFAULT_MODEL, EngineConfig
from serve.errors import ConfigError

LOWEST_SHARE = 64  # a search goes down to this part of its first rate
MIN_SEARCH_S = 30.0
# A run lasts this many times the longest limit. A queue that grows by a tenth of the time then
# exceeds the limit at the end.
SEARCH_LIMITS = 10


def run(options: OnlineOptions) -> bool:
    """Runs the load and reports. Returns whether the runs are valid.

    Raises ConfigError before anything runs."""
    files = {
        "json_file": options.json_file,
        "jsonl_file": options.jsonl_file,
        "html_file": options.html_file,
        "png_file": options.png_file,
    }
    check_files(**files)
    slo = _slo(options)
    options.load_options(0)
    runs: list[RunResult] = []
    search: SearchResult | None = None
    error: BaseException | None = None
    try:
        with _offering(options) as offer_once:
            search = _offer_all(options, slo, _recorded(offer_once, runs))
            error = None if search is None else search.error
    except ENDINGS as exc:
        if not runs:
            raise
        error = exc
    if error is not None:
        runs[-1].notes.append(f"ended early: {ending(error)}")
    is_valid = report(
        runs,
        {"command": command_line(["serve", *sys.argv[1:]]), **_shown_settings(options)},
        slo=slo,
        search=search,
        console=Console(),
        **files,
    )
    if error is not None:
        raise error
    return is_valid


def _slo(options: OnlineOptions) -> Slo | None:
    if options.slo is None:
        return None
    return parse_slo(options.slo, from_schedule=options.slo_from == "schedule")


def _recorded(offer_once: OfferOnce, runs: list[RunResult]) -> OfferOnce:
    def recorded(rate: float | None, seed: int, requests: int | None = None) -> RunResult:
        runs.append(offer_once(rate, seed, requests))
        return runs[-1]

    return recorded


def _shown_settings(options: OnlineOptions) -> dict[str, Any]:
    """Returns the settings that differ from their defaults, without secrets."""
    shown = {}
    for item in fields(options):
        value = getattr(options, item.name)
        if item.name not in ("engine", "api_key_file", "header") and value != item.default:
            shown[item.name] = str(value) if isinstance(value, Path) else value
    if options.url is None:
        defaults = {item.name: item.default for item in fields(EngineConfig)}
        shown |= {name: v for name, v in options.engine.items() if v != defaults[name]}
    return shown


def _offer_all(
    options: OnlineOptions, slo: Slo | None, offer_once: OfferOnce
) -> SearchResult | None:
    """Searches for a rate, or offers every rate with every seed until the user interrupts."""
    if options.find_max_qps:
        assert slo is not None, "OnlineOptions checks it"
        return _search(options, slo, offer_once)
    for seed in range(options.seed, options.seed + options.seeds):
        for rate in options.rates:
            if offer_once(rate, seed, None).was_interrupted:
                return None
    return None


def _search(options: OnlineOptions, slo: Slo, offer_once: OfferOnce) -> SearchResult:
    """Searches for the highest rate. Each rate runs long enough to show that it is too high, unless
    the user sets a number of requests or a duration."""
    (start,) = options.rates if len(options.rates) == 1 else (None,)
    if start is None:
        raise ConfigError("find_max_qps needs exactly one qps, its first rate")
    needed_s = max(MIN_SEARCH_S, SEARCH_LIMITS * slo.longest_s)
    is_given = options.requests is not None or options.duration is not None

    def run(qps: float, seed: int) -> RunResult:
        count = None if is_given else max(DEFAULT_REQUESTS, math.ceil(qps * needed_s))
        result = offer_once(qps, seed, count)
        taken_s = len(result.records) / qps
        if taken_s < needed_s and (count is None or len(result.records) < count):
            result.notes.append(
                f"{len(result.records)} requests last {taken_s:.3g} s, but a search needs"
                f" {needed_s:g} s to see that a rate is too high"
            )
        return result

    return find_max_qps(
        run,
        slo,
        attainment=options.attainment,
        seeds=options.seeds,
        start=start,
        lowest=start / LOWEST_SHARE,
        resolution=options.resolution,
        first_seed=options.seed,
    )


@contextlib.contextmanager
def _offering(options: OnlineOptions) -> Iterator[OfferOnce]:
    """Opens the target, yields a function that offers it one rate, and closes the target."""
    if options.simulate:
        from bench.simulate.command import simulated

        yield simulated(options)
        return
    target = _target(options)
    console = Console(stderr=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        async def once(rate: float | None, seed: int, requests: int | None) -> RunResult:
            dataset = _fitted(options.dataset_settings, target)
            schedule, notes = make_schedule(
                dataset,
                ArrivalSettings(options.arrival, options.speedup),
                qps=rate,
                requests=options.requests if requests is None else requests,
                duration_s=options.duration,
                seed=seed,
                tokens=target.prompt_tokens,
            )
            warmup = make_warm_up(dataset, options.warmup, seed, target.prompt_tokens)
            load = replace(options.load_options(seed), warmup=warmup)
            with LiveView(
                console, total=len(schedule.works), qps=schedule.qps, title=target.name
            ) as view:
                result = await offer(schedule, target, load, view.update)
            result.notes += notes
            return result

        runner.run(target.__aenter__())
        try:
            yield lambda rate, seed, requests: runner.run(once(rate, seed, requests))
        finally:
            runner.run(target.__aexit__(None, None, None))


def _fitted(dataset: DatasetSettings, target: Target) -> DatasetSettings:
    """Completes the settings with the target's context length and token counter."""
    return replace(
        dataset,
        max_model_len=dataset.max_model_len or target.max_model_len,
        count_tokens=target.count_tokens,
    )


def _target(options: OnlineOptions) -> Target:
    if options.url is None:
        from bench.plan.shapes import known_models
        from serve import Engine

        if options.model in known_models() and options.model != DEFAULT_MODEL:
            raise ConfigError(
                f"{options.model} is a name of `serve plan`, which only --simulate takes; a load"
                " needs a model's directory"
            )
        location = find_model(options.model, revision=options.revision)
        return EngineTarget(
            Engine(location.model, served_model_name=location.name, **options.engine)
        )
    headers = {}
    for number, line in enumerate(options.header or (), 1):
        name, colon, value = line.partition(":")
        if not colon or not name.strip():  # the text may be a secret: the error does not show it
            raise ConfigError(f"header must be NAME: VALUE; number {number} is not")
        headers[name.strip()] = value.strip()
    return ServerTarget(
        ServerSettings(
            options.url,
            model=options.server_model,
            api_key=read_client_key(options.api_key_file),
            headers=headers,
            timeout_s=options.timeout,
        )
    )
