"""`serve bench`: a load, and the measurements of other names. Heavy imports happen inside."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from bench.cli.measurements import measurements
from bench.cli.plan import plan
from bench.common import cli_options as own
from serve.cli import examples
from serve.cli import options as opt
from serve.cli.reporting import reported, set_up_logging
from serve.config import DEFAULT_MODEL
from serve.errors import ConfigError


class Bench(TyperCommand):
    """A first word that names a measurement of its own gets its own options and help."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for option in self.params:
            if option.name in _ENGINE_SETTINGS:
                setattr(option, "rich_help_panel", "The engine, here or simulated")  # noqa: B010

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        group: Any = typer.main.get_command(measurements)
        named = group.commands.get(args[0]) if args else None
        if named is None:
            return super().make_context(info_name, args, parent, **extra)
        return named.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)


def online(
    model: opt.Model = DEFAULT_MODEL,
    qps: own.Qps = None,
    arrival: own.Arrival = "poisson",
    requests: own.Requests = None,
    duration: own.Duration = None,
    speedup: own.Speedup = None,
    seed: own.Seed = 0,
    seeds: own.Seeds = 1,
    warmup: own.Warmup = 4,
    warmup_s: own.WarmupS = 0.0,
    grace_s: own.Grace = None,
    max_concurrency: own.MaxConcurrency = None,
    cancel_rate: own.CancelRate = 0.0,
    cancel_after_s: own.CancelAfter = None,
    cancel_after_chunks: own.CancelAfterChunks = None,
    probe_qps: own.ProbeQps = 0.0,
    processes: own.Processes = None,
    dataset: own.Dataset = None,
    input_len: own.InputLen = None,
    output_len: own.OutputLen = None,
    trace_start: own.TraceStart = 0.0,
    trace_end: own.TraceEnd = None,
    block_size: own.BlockSize = 512,
    num_groups: own.Groups = 8,
    prefix_len: own.PrefixLen = 512,
    num_turns: own.Turns = 4,
    as_text: own.TextPrompts = False,
    url: own.Url = None,
    in_process: own.InProcess = False,
    simulate: own.Simulate = False,
    machine: own.Machine = None,
    server_model: own.ServerModel = None,
    api_key_file: own.ApiKeyFile = None,
    header: own.Header = None,
    timeout: own.Timeout = None,
    slo: own.SLOs = None,
    slo_from: own.SLOFrom = "schedule",
    find_max_qps: own.FindMaxQps = False,
    attainment: own.Attainment = 0.99,
    resolution: own.Resolution = 0.05,
    json_file: own.JsonFile = None,
    jsonl_file: own.JsonlFile = None,
    html_file: own.HtmlFile = None,
    png_file: own.PngFile = None,
    load_format: opt.LoadFormat = "safetensors",
    dtype: opt.DType = "auto",
    kv_dtype: opt.KVDType = "auto",
    max_model_len: opt.MaxModelLen = None,
    max_num_seqs: opt.MaxNumSeqs = 256,
    max_num_batched_tokens: opt.MaxNumBatchedTokens = None,
    inter_token_slo_ms: opt.InterTokenSLO = None,
    kv_cache_bytes: opt.KVCacheBytes = None,
    prefix_cache: opt.UsePrefixCache = True,
    memory_policy: opt.MemoryPolicy = "predicted",
    order: opt.Order = "fcfs",
    ttft_slo: opt.TTFTSLO = None,
    compute_threads: opt.ComputeThreads = None,
    backend: opt.Backend = "auto",
) -> None:
    """Offer a load to a server, an engine in this process or a simulated one; say how it did.

    How soon answers came is counted from when each request was due.

    `serve bench NAME --help` goes with each measurement of its own: throughput, latency, startup,
    ops, io, engine, http, prefix-cache, nodes and ablation; compare sets results side by side.
    """
    given = dict(locals())
    engine = {name: given.pop(name) for name in _ENGINE_SETTINGS}
    from bench.cli.load import OnlineOptions, run

    set_up_logging("warning")
    with reported():
        _not_a_measurement(model)
        is_valid = run(OnlineOptions(**given, engine=engine))
    if not is_valid:
        raise typer.Exit(3)


_ENGINE_SETTINGS = (
    "load_format",
    "dtype",
    "kv_dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "inter_token_slo_ms",
    "kv_cache_bytes",
    "prefix_cache",
    "memory_policy",
    "order",
    "ttft_slo",
    "compute_threads",
    "backend",
)


def _not_a_measurement(model: str) -> None:
    group: Any = typer.main.get_command(measurements)
    if model in group.commands:  # a model directory of that name is ./ops
        raise ConfigError(f"options come after the name: `serve bench {model} [OPTIONS]`")


app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich")
app.command("bench", cls=Bench, epilog=examples.BENCH)(online)
app.command("plan", epilog=examples.PLAN)(plan)


def command(name: str | None) -> Any:
    """The click command `serve bench` or `serve plan`."""
    group: Any = typer.main.get_command(app)
    return group.commands[name]
