"""The commands `serve bench NAME`. Heavy imports happen inside the functions."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.common.cli_options import whole_numbers
from serve.cli import options
from serve.cli.reporting import reported, set_up_logging
from serve.errors import MergestepError

measurements = typer.Typer(pretty_exceptions_enable=False, add_completion=False)

Model = Annotated[
    str | None,
    typer.Argument(
        help="A model's directory or its name on the hub, or random:SHAPE (such as"
        " random:llama-1b): random weights, which the first run writes to ~/.cache/mergestep.",
        show_default="the embedded model",
    ),
]
PackedCache = Annotated[
    str, typer.Option(help="Where packed weights are kept, as for `serve run`.", metavar="DIR")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")]
PngFile = Annotated[Path | None, typer.Option("--png", help="Draw the figures to this file.")]
Requests = Annotated[int | None, typer.Option(help="Number of requests.")]
Dataset = Annotated[
    str | None, typer.Option(help="A data set of `serve bench` (docs/workloads.md).")
]
InputLen = Annotated[int | None, typer.Option(help="Tokens of each random prompt.")]
OutputLen = Annotated[int | None, typer.Option(help="Tokens of each answer.")]
Seed = Annotated[int, typer.Option(help="Seed of the requests.")]


def _measure(target: str, settings: Mapping[str, Any]) -> Any:
    """Imports target ("module:function"), calls it with the settings and returns its result. A
    revision is found, or fetched, before."""
    module, _, name = target.partition(":")
    measure = getattr(import_module(module), name)
    settings = dict(settings)
    revision = settings.pop("revision", None)
    set_up_logging("warning")
    with reported():
        if revision is not None:
            from bench.common.checkpoints import model_directory

            settings["model"] = model_directory(settings["model"], revision=revision)
        return measure(**settings)


@measurements.command()
def throughput(
    model: Model = None,
    revision: options.Revision = None,
    dataset: Dataset = None,
    requests: Requests = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    repeats: Annotated[int | None, typer.Option(help="Repetitions; the default is 3.")] = None,
    max_num_seqs: options.MaxNumSeqs = 256,
    max_model_len: options.MaxModelLen = None,
    dtype: options.DType = "auto",
    kv_dtype: options.KVDType = "auto",
    compute_threads: options.ComputeThreads = None,
    backend: options.Backend = "auto",
    peer: Annotated[str | None, typer.Option(help="Measure transformers in the same run.")] = None,
    seed: Seed = 0,
    json_file: JsonFile = None,
    quick: options.Quick = False,
) -> None:
    """Send all requests at once and report tokens per second, and their share of the bound."""
    _measure("bench.offline.throughput:throughput", locals())


@measurements.command()
def latency(
    model: Model = None,
    revision: options.Revision = None,
    batch: Annotated[
        str | None,
        typer.Option(help="Numbers of decoding sequences, with commas; the default is 1 to 64."),
    ] = None,
    context: Annotated[
        int, typer.Option(help="Tokens of each sequence before the first step.")
    ] = 256,
    steps: Annotated[int, typer.Option(help="Steps of each batch and round.")] = 32,
    prefill: Annotated[str | None, typer.Option(help="Lengths of prompts, with commas.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of all measurements.")] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=COMMAND of another engine, measured in every round like this one"
            " (bench/peers). Repeat the option for more."
        ),
    ] = None,
    mixed: Annotated[
        bool | None,
        typer.Option("--mixed/--no-mixed", help="Measure 16 mixed requests, too."),
    ] = None,
    dtype: options.DType = "auto",
    compute_threads: options.ComputeThreads = None,
    backend: options.Backend = "auto",
    packed_cache: PackedCache = "off",
    json_file: JsonFile = None,
    quick: options.Quick = False,
) -> None:
    """Measure steps of a model: decode by batch, prefill by length, and the machine's bound."""
    settings = dict(locals())
    del settings["batch"], settings["prefill"], settings["peer"]
    with reported():
        settings["batches"] = whole_numbers("batch", batch)
        settings["prefills"] = whole_numbers("prefill", prefill)
    _measure("bench.cli.latency:latency", {**settings, "peers": peer or ()})


@measurements.command()
def startup(
    model: Model = None,
    revision: options.Revision = None,
    repeats: Annotated[int | None, typer.Option(help="Repetitions; the default is 5.")] = None,
    cold: Annotated[
        bool, typer.Option(help="Also start with the model's files out of memory.")
    ] = True,
    dtype: options.DType = "auto",
    compute_threads: options.ComputeThreads = None,
    packed_cache: PackedCache = "auto",
    limit_s: Annotated[
        float, typer.Option("--limit", help="Timeout of one start in seconds.")
    ] = 600.0,
    json_file: JsonFile = None,
    quick: options.Quick = False,
) -> None:
    """Measure `serve run` from its start to the first token, and where the time goes."""
    _measure("bench.cli.startup:startup", locals())


@measurements.command()
def ops(json_file: JsonFile = None, quick: options.Quick = False) -> None:
    """Measure each kernel against what the machine can do."""
    from bench.kernels import ops

    with reported():
        _need_kernels("ops")
        ops.run_and_report(quick=quick, json_file=json_file)


@measurements.command()
def io(
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", metavar="DIR", help="Directory; the default is this one.", show_default=False
        ),
    ] = None,
    json_file: JsonFile = None,
    quick: options.Quick = False,
) -> None:
    """Measure the disk below DIR, in a temporary folder."""
    from bench.kernels import io

    with reported():
        _need_kernels("io")
        io.run_and_report(directory or Path.cwd(), quick=quick, json_file=json_file)


def _need_kernels(what: str) -> None:
    from ops.cpu import native_library

    if not native_library.is_available():
        raise MergestepError(f"`serve bench {what}` needs the native kernels, which are not built")


@measurements.command()
def ablation(
    model: Model = None,
    revision: options.Revision = None,
    dataset: Dataset = None,
    requests: Requests = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds of all variants; the default is 8.")
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option(help="Maximum number of sequences that run at once.")
    ] = 64,
    qps: Annotated[
        float | None,
        typer.Option(help="Rate for the latencies; the default is 85 % of the highest."),
    ] = None,
    at_rate: Annotated[bool, typer.Option(help="Also measure latencies at a rate.")] = True,
    kv_cache_bytes: options.KVCacheBytes = None,
    variants: Annotated[
        str | None, typer.Option(help="Run only these, with commas.", show_default=False)
    ] = None,
    dtype: options.DType = "auto",
    compute_threads: options.ComputeThreads = None,
    seed: Seed = 0,
    json_file: JsonFile = None,
    png_file: PngFile = None,
    quick: options.Quick = False,
) -> None:
    """Measure the same requests with each optimisation off in turn, in one interleaved run."""
    settings = dict(locals())
    settings["variants"] = variants.split(",") if variants is not None else None
    _measure("bench.cli.ablation:ablation", settings)


@measurements.command()
def compare(
    files: Annotated[list[Path], typer.Argument(help="JSON files of `serve bench`.")],
    fail_over: Annotated[
        str | None,
        typer.Option(
            help="Exit with code 3 if a figure is worse by more than this share, such as 10%."
        ),
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Write the latency distributions.")
    ] = None,
    png_file: PngFile = None,
) -> None:
    """Set the figures of results beside those of the first."""
    from rich.console import Console

    from bench.load.report.compare import compare as compare_results

    with reported():
        is_good = compare_results(
            files, fail_over=fail_over, console=Console(), html_file=html_file, png_file=png_file
        )
    if not is_good:
        raise typer.Exit(3)


@measurements.command()
def engine(
    model: Model = None,
    revision: options.Revision = None,
    seqs: Annotated[int, typer.Option(help="Sequences that run at once.")] = 256,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of each answer; the default is 400.")
    ] = None,
    repeats: Annotated[int | None, typer.Option(help="Repetitions; the default is 5.")] = None,
    long_prompt: Annotated[
        bool,
        typer.Option(
            "--long-prompt",
            help="Measure streams and short requests beside a prompt of 32k tokens instead: chunks"
            " by SLO against static chunk sizes.",
        ),
    ] = False,
    json_file: JsonFile = None,
    quick: options.Quick = False,
) -> None:
    """Measure the engine's own work, with a device that takes no time."""
    settings = dict(locals())
    if settings.pop("long_prompt"):
        _measure("bench.engine.long_prompt:long_prompt", {"json_file": json_file, "quick": quick})
    else:
        _measure("bench.engine.engine_overhead:engine", settings)


@measurements.command()
def stalls(
    model: Model = None,
    revision: options.Revision = None,
    qps: Annotated[
        str | None,
        typer.Option(
            "--qps",
            help="Requests per second, with commas; inf sends all at once.",
            show_default="four shares of the capacity, and inf",
        ),
    ] = None,
    chunks: Annotated[
        str | None,
        typer.Option(help="Static chunk sizes, with commas.", show_default="32,64,128,256"),
    ] = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    seconds: Annotated[
        float | None, typer.Option(help="Seconds of requests in each run.", show_default="20")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds; the default is 1.")] = None,
    dtype: options.DType = "auto",
    seed: Seed = 0,
    json_file: JsonFile = None,
    quick: options.Quick = False,
) -> None:
    """Measure how arriving prompts stall streams: the default chunks against static ones."""
    settings = dict(locals())
    with reported():
        settings["chunks"] = whole_numbers("chunks", chunks) or ()
    _measure("bench.engine.stalls:stalls", settings)


@measurements.command()
def http(
    model: Model = None,
    revision: options.Revision = None,
    streams: Annotated[int, typer.Option(help="Streams at once.")] = 32,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 32,
    output_len: OutputLen = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds; the default is 5.")] = None,
    dtype: options.DType = "auto",
    json_file: JsonFile = None,
    quick: options.Quick = False,
) -> None:
    """Measure the cost of HTTP: the same streams through a server and in process, in turn."""
    _measure("bench.engine.http_overhead:http", locals())


@measurements.command("prefix-cache")
def prefix_cache(
    model: Annotated[
        str,
        typer.Argument(help="A Hugging Face directory, or random:SHAPE."),
    ] = "random:llama-1b",
    revision: options.Revision = None,
    prefix: Annotated[
        int | None, typer.Option(help="Tokens that the prompts share; the default is 4000.")
    ] = None,
    repeats: Annotated[int | None, typer.Option(help="Repetitions; the default is 5.")] = None,
    json_file: JsonFile = None,
    quick: options.Quick = False,
) -> None:
    """Measure the first token when the prefix is computed, cached in memory and cached on disk."""
    _measure("bench.engine.prefix_cache:prefix_cache", locals())


@measurements.command()
def soak(
    model: Model = None,
    revision: options.Revision = None,
    minutes: Annotated[float, typer.Option(help="Minutes of load.")] = 60.0,
    streams: Annotated[int, typer.Option(help="Streams at once.")] = 64,
    aborts: Annotated[
        float, typer.Option(help="Share of the calls that their client leaves at a random moment.")
    ] = 0.3,
    hostile: Annotated[float, typer.Option(help="Share of hostile calls.")] = 0.1,
    max_slope: Annotated[
        float, typer.Option(help="Fail if memory grows by more than this many MB per hour.")
    ] = 1.0,
    run_options: Annotated[
        str,
        typer.Option(
            "--run-options",
            help="More options of the server, in quotes, such as '--order fair'.",
            show_default=False,
        ),
    ] = "",
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Load a server with a mix of all calls, aborted and hostile ones, and fit its memory's slope.

    The server is a process of its own with a small K/V pool and store of responses, so that its
    caches are full after minutes. The exit code is 1 for a fault, and 3 if the run is too short to
    tell whether memory grows.
    """
    if not _measure("bench.cli.soak:soak", locals()):
        raise typer.Exit(3)


@measurements.command()
def nodes(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help="Any of equality, capacity, speed, overlap, layer.", show_default="all"
        ),
    ] = None,
    json_file: JsonFile = None,
    quick: options.Quick = False,
) -> None:
    """Measure K/V and attention on memory nodes of this machine."""
    _measure("bench.nodes.memory_nodes:nodes", {**locals(), "what": what or ()})
