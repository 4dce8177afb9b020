"""`serve bench NAME`: the measurements besides a load. Heavy imports happen inside them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.common.cli_options import whole_numbers
from serve.cli import options as opt
from serve.cli.reporting import reported, set_up_logging
from serve.errors import MergestepError

measurements = typer.Typer(pretty_exceptions_enable=False, add_completion=False)

Model = Annotated[
    str | None,
    typer.Argument(
        help="A Hugging Face directory, or random:SHAPE (such as random:llama-1b): random"
        " weights, written to ~/.cache/mergestep at the first time.",
        show_default="the embedded model",
    ),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write all figures here.")]
PngFile = Annotated[Path | None, typer.Option("--png", help="Draw them here.")]
Requests = Annotated[int | None, typer.Option(help="How many.")]
Dataset = Annotated[str | None, typer.Option(help="As `serve bench` has them (docs/workloads.md).")]
InputLen = Annotated[int | None, typer.Option(help="Random prompts of exactly that length.")]
OutputLen = Annotated[int | None, typer.Option(help="And answers of that one.")]
Seed = Annotated[int, typer.Option(help="Of what is asked.")]


@measurements.command()
def throughput(
    model: Model = None,
    dataset: Dataset = None,
    requests: Requests = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    repeats: Annotated[int | None, typer.Option(help="3 by default.")] = None,
    max_num_seqs: opt.MaxNumSeqs = 256,
    max_model_len: opt.MaxModelLen = None,
    dtype: opt.DType = "auto",
    kv_dtype: opt.KVDType = "auto",
    compute_threads: opt.ComputeThreads = None,
    backend: opt.Backend = "auto",
    peer: Annotated[str | None, typer.Option(help="transformers, in the same run.")] = None,
    seed: Seed = 0,
    json_file: JsonFile = None,
    quick: opt.Quick = False,
) -> None:
    """All requests at once: tokens a second, and the share of what the machine allows."""
    settings = dict(locals())
    from bench.offline.throughput import throughput as measure

    set_up_logging("warning")
    with reported():
        measure(**settings)


@measurements.command()
def latency(
    model: Model = None,
    batch: Annotated[
        str | None, typer.Option(help="Sequences that decode, with commas; 1 to 64.")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens before the first step.")] = 256,
    steps: Annotated[int, typer.Option(help="Of each batch and round.")] = 32,
    prefill: Annotated[str | None, typer.Option(help="Prompts' lengths, with commas.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Of everything.")] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="NAME=COMMAND, run in every round (bench/peers); repeat it."),
    ] = None,
    dtype: opt.DType = "auto",
    compute_threads: opt.ComputeThreads = None,
    backend: opt.Backend = "auto",
    json_file: JsonFile = None,
    quick: opt.Quick = False,
) -> None:
    """Steps of a model: decoding by batch, prompts by length, beside what the machine allows."""
    from bench.cli.latency import latency as measure

    set_up_logging("warning")
    with reported():
        measure(
            model,
            batches=whole_numbers("batch", batch),
            context=context,
            steps=steps,
            prefills=whole_numbers("prefill", prefill),
            rounds=rounds,
            peers=peer or (),
            dtype=dtype,
            compute_threads=compute_threads,
            backend=backend,
            json_file=json_file,
            quick=quick,
        )


@measurements.command()
def startup(
    model: Model = None,
    repeats: Annotated[int | None, typer.Option(help="5 by default.")] = None,
    cold: Annotated[bool, typer.Option(help="Also with the model's files out of memory.")] = True,
    dtype: opt.DType = "auto",
    compute_threads: opt.ComputeThreads = None,
    limit_s: Annotated[float, typer.Option("--limit", help="Seconds for one start.")] = 600.0,
    json_file: JsonFile = None,
    quick: opt.Quick = False,
) -> None:
    """`serve run` from its start to the first token, and where the time goes."""
    settings = dict(locals())
    from bench.cli.startup import startup as measure

    set_up_logging("warning")
    with reported():
        measure(**settings)


@measurements.command()
def ops(json_file: JsonFile = None, quick: opt.Quick = False) -> None:
    """The kernels, each against what the machine can do."""
    from bench.kernels import ops

    with reported():
        _need_kernels("ops")
        ops.run_and_report(quick=quick, json_file=json_file)


@measurements.command()
def io(
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Where; here by default.", show_default=False),
    ] = None,
    json_file: JsonFile = None,
    quick: opt.Quick = False,
) -> None:
    """The way to the disk below DIR, in a temporary folder."""
    from bench.kernels import io

    with reported():
        _need_kernels("io")
        io.run_and_report(directory or Path.cwd(), quick=quick, json_file=json_file)


def _need_kernels(what: str) -> None:
    from ops.cpu import native

    if not native.is_available():
        raise MergestepError(f"`serve bench {what}` needs the native kernels, which are not built")


@measurements.command()
def ablation(
    model: Model = None,
    dataset: Dataset = None,
    requests: Requests = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    rounds: Annotated[int | None, typer.Option(help="Of all variants; 8 by default.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.")] = 64,
    qps: Annotated[
        float | None, typer.Option(help="Rate of the latencies; 60 % of what is reached.")
    ] = None,
    at_rate: Annotated[bool, typer.Option(help="Also latencies at a rate.")] = True,
    kv_cache_bytes: opt.KVCacheBytes = None,
    variants: Annotated[
        str | None, typer.Option(help="Only these, with commas.", show_default=False)
    ] = None,
    dtype: opt.DType = "auto",
    compute_threads: opt.ComputeThreads = None,
    seed: Seed = 0,
    json_file: JsonFile = None,
    png_file: PngFile = None,
    quick: opt.Quick = False,
) -> None:
    """The same requests with each optimisation off in turn, in one interleaved run."""
    settings = dict(locals())
    from bench.cli.ablation import ablation as measure

    set_up_logging("warning")
    with reported():
        names = variants.split(",") if variants is not None else None
        measure(**{**settings, "variants": names})


@measurements.command()
def compare(
    files: Annotated[list[Path], typer.Argument(help="JSON files of `serve bench`.")],
    fail_over: Annotated[
        str | None,
        typer.Option(help="Exit code 3 if a figure is worse by more than that share, as 10%."),
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Latencies over each other.")
    ] = None,
    png_file: PngFile = None,
) -> None:
    """Results beside the first one's."""
    from rich.console import Console

    from bench.load.report.compare import compare as set_side_by_side

    with reported():
        is_good = set_side_by_side(
            files, fail_over=fail_over, console=Console(), html_file=html_file, png_file=png_file
        )
    if not is_good:
        raise typer.Exit(3)


@measurements.command()
def engine(
    model: Model = None,
    seqs: Annotated[int, typer.Option(help="Sequences at once.")] = 256,
    tokens: Annotated[int | None, typer.Option(help="Of each answer; 400.")] = None,
    repeats: Annotated[int | None, typer.Option(help="5 by default.")] = None,
    long_prompt: Annotated[
        bool,
        typer.Option(
            "--long-prompt",
            help="Measure streams and short requests beside a prompt of 32k tokens instead: chunks"
            " by SLO against static chunk sizes.",
        ),
    ] = False,
    json_file: JsonFile = None,
    quick: opt.Quick = False,
) -> None:
    """Our own machinery, beside a device that takes no time."""
    settings = dict(locals())
    is_long_prompt = settings.pop("long_prompt")
    from bench.engine.engine_overhead import engine as measure
    from bench.engine.long_prompt import long_prompt as measure_long_prompt

    set_up_logging("warning")
    with reported():
        if is_long_prompt:
            measure_long_prompt(json_file=json_file, quick=quick)
        else:
            measure(**settings)


@measurements.command()
def http(
    model: Model = None,
    streams: Annotated[int, typer.Option(help="At once.")] = 32,
    input_len: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 32,
    output_len: OutputLen = None,
    rounds: Annotated[int | None, typer.Option(help="5 by default.")] = None,
    dtype: opt.DType = "auto",
    json_file: JsonFile = None,
    quick: opt.Quick = False,
) -> None:
    """What HTTP costs: the same streams through a server and in process, in turn."""
    settings = dict(locals())
    from bench.engine.http_overhead import http as measure

    set_up_logging("warning")
    with reported():
        measure(**settings)


@measurements.command("prefix-cache")
def prefix_cache(
    model: Annotated[
        str,
        typer.Argument(help="A Hugging Face directory, or random:SHAPE."),
    ] = "random:llama-1b",
    prefix: Annotated[int | None, typer.Option(help="Tokens that prompts share; 4000.")] = None,
    repeats: Annotated[int | None, typer.Option(help="5 by default.")] = None,
    json_file: JsonFile = None,
    quick: opt.Quick = False,
) -> None:
    """A first token with a prefix computed, in memory and on disk."""
    settings = dict(locals())
    from bench.engine.prefix_cache import prefix_cache as measure

    set_up_logging("warning")
    with reported():
        measure(**settings)


@measurements.command()
def nodes(
    what: Annotated[
        list[str] | None,
        typer.Argument(help="capacity, speed, overlap, layer.", show_default="all"),
    ] = None,
    json_file: JsonFile = None,
    quick: opt.Quick = False,
) -> None:
    """K/V and attention on memory nodes of this machine."""
    from bench.nodes.memory_nodes import nodes as measure

    set_up_logging("warning")
    with reported():
        measure(what or (), json_file=json_file, quick=quick)
