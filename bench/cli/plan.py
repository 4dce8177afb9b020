"""The options of `serve plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.common.cli_options import whole_numbers
from bench.plan.quantities import parse_seconds, parse_token_list, parse_tokens
from serve.cli.config_file import parse_size
from serve.cli.reporting import reported, set_up_logging
from serve.config import DEFAULT_MODEL
from serve.errors import ConfigError

if TYPE_CHECKING:
    from bench.plan.beyond_memory import Beyond
    from bench.plan.kv_beyond_memory import KVOffload

_LOAD = "Load, SLO and budget"
_GRID = "Many GPUs for one long prompt"
_PARTED = "Prompts apart from answers"
_OFFLOAD = "K/V beyond memory"
_BEYOND = "Weights beyond memory"
_OF_KV = (
    *("kv-offload-bytes", "kv-cache-bytes", "disk-rate", "kv-policy", "kv-offload-dir"),
    *("max-num-seqs", "max-model-len"),
)
_OF_WEIGHTS = "weight-memory-bytes", "host", "host-memory", "link-rate", "disk-rate"
NOT_SERVED = 3  # exit code


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A name (--list), a Hugging Face directory, or its config.json.",
            show_default="the embedded model",
        ),
    ] = DEFAULT_MODEL,
    machine: Annotated[
        list[str] | None,
        typer.Option(
            help="A name (--list), 4xNAME, or here (measured). One machine is shown in detail,"
            " several (repeat the option) are compared; by default all are compared.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Type of the weights: int8, int4, nf4, fp8, bfloat16 or float32.")
    ] = "int8",
    kv_dtype: Annotated[
        str, typer.Option(help="Type of the K/V: auto, int8, int4, bfloat16 or float32.")
    ] = "auto",
    prompt: Annotated[
        int | None,
        typer.Option(help="Tokens of a prompt; the default is 1024.", rich_help_panel=_LOAD),
    ] = None,
    output: Annotated[
        int | None,
        typer.Option(help="Tokens of an answer; the default is 256.", rich_help_panel=_LOAD),
    ] = None,
    ttft: Annotated[
        str | None,
        typer.Option(
            help="SLO: time to the first token, on average: 500ms or 30s; a bare number is in ms,"
            " for grids in seconds.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    tpot: Annotated[
        float | None,
        typer.Option(help="SLO: ms between tokens, at most.", rich_help_panel=_LOAD),
    ] = None,
    usd_per_h: Annotated[
        float | None,
        typer.Option("--usd-per-hour", help="Budget in dollars per hour.", rich_help_panel=_LOAD),
    ] = None,
    usd_per_m: Annotated[
        float | None,
        typer.Option(
            "--usd-per-million",
            help="Budget in dollars per million output tokens.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help="Batch sizes of one machine's table, with commas.")
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            help="Context lengths of that table, in tokens: 8192,128K. For grids: the length of"
            " the prompt; the default is 1M."
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            help="Search grids of up to this many GPUs (tensor, sequence pipeline and K/V"
            " parallelism) for one long prompt; 128 with --tbt alone. --machine names the GPU; the"
            " default is h100-sxm.",
            rich_help_panel=_GRID,
        ),
    ] = None,
    tbt: Annotated[
        str | None,
        typer.Option(
            help="SLO: time between tokens, at most: 30ms or 0.03.", rich_help_panel=_GRID
        ),
    ] = None,
    gpus_per_server: Annotated[
        int | None,
        typer.Option(
            help="GPUs that share the links of a server; the default is 8.", rich_help_panel=_GRID
        ),
    ] = None,
    disaggregated: Annotated[
        bool,
        typer.Option(
            "--disaggregated", help="Also show compute devices with separate memory devices."
        ),
    ] = False,
    prefill_apart: Annotated[
        str | None,
        typer.Option(
            metavar="PREFILL:DECODE",
            help="Simulate so many servers of one --machine, such as 1:1: each call at one server,"
            " prompts apart from answers, and as `serve front` decides.",
            rich_help_panel=_PARTED,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Calls a second; by default 50 and 80 % of what these servers can do.",
            rich_help_panel=_PARTED,
        ),
    ] = None,
    kv_offload_bytes: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="Also predict K/V of one --machine that is in a file beyond memory.",
            rich_help_panel=_OFFLOAD,
        ),
    ] = None,
    kv_cache_bytes: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="K/V in memory then; by default 40 % of the free memory, as a server takes.",
            show_default=False,
            rich_help_panel=_OFFLOAD,
        ),
    ] = None,
    kv_policy: Annotated[
        str | None,
        typer.Option(help="off, or quest:budget=12%.", rich_help_panel=_OFFLOAD),
    ] = None,
    kv_offload_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where the disk is measured; by default the user's cache.",
            show_default=False,
            rich_help_panel=_OFFLOAD,
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(help="That of the server; by default its own.", rich_help_panel=_OFFLOAD),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="That of the server; by default the model's.", rich_help_panel=_OFFLOAD),
    ] = None,
    disk_rate: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="Bytes a second of the disk, such as 500M, for K/V and for weights; by default"
            " measured here, and 5 GB/s beside a GPU.",
            show_default=False,
            rich_help_panel=_OFFLOAD,
        ),
    ] = None,
    weight_memory_bytes: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="Memory of weights; by default 75 %, if they do not fit.",
            show_default=False,
            rich_help_panel=_BEYOND,
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="The CPU beside a GPU, a name (--list); the default is ryzen-9950x.",
            rich_help_panel=_BEYOND,
        ),
    ] = None,
    host_memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="Its free memory; by default that of the table.",
            show_default=False,
            rich_help_panel=_BEYOND,
        ),
    ] = None,
    link_rate: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="Bytes a second from it to the GPU; the default is 25 GB/s.",
            show_default=False,
            rich_help_panel=_BEYOND,
        ),
    ] = None,
    top: Annotated[int, typer.Option(help="Rows of the comparison.")] = 15,
    hardware: Annotated[
        Path | None,
        typer.Option(help="A TOML file with more devices, or with other figures for known ones."),
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="List the known models and machines.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Compare predictions for this machine with measured steps."),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.")
    ] = None,
    png_file: Annotated[
        Path | None, typer.Option("--png", help="Draw the curves to this file.")
    ] = None,
) -> None:
    """Predict how fast MODEL runs on machines, and compare their costs, from sizes and peaks.

    The exit code is 3 if no machine meets the SLO within the budget; without either, also if one
    has no room for the weights and nothing is predicted of them beyond its memory."""
    set_up_logging("warning")
    with reported():
        if show_list:
            _show_known(hardware)
            return
        if check:
            from bench.plan.check import run_and_report

            run_and_report(model=None if model == DEFAULT_MODEL else Path(model))
            return
        budget: dict[str, object] = {"usd-per-hour": usd_per_h, "usd-per-million": usd_per_m}
        others: dict[str, object] = {"disaggregated": disaggregated or None, "png": png_file}
        of_kv = kv_offload_bytes, kv_cache_bytes, disk_rate, kv_policy, kv_offload_dir
        of_kv_too = max_num_seqs, max_model_len
        in_file: dict[str, Any] = dict(zip(_OF_KV, of_kv + of_kv_too, strict=True))
        of_weights = weight_memory_bytes, host, host_memory, link_rate, disk_rate
        beyond: dict[str, Any] = dict(zip(_OF_WEIGHTS, of_weights, strict=True))
        common: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype, "json_file": json_file}
        if any(option is not None for option in (gpus, tbt, gpus_per_server)):
            load = {"prompt": prompt, "output": output, "tpot": tpot, "batch": batch}
            others |= {"prefill-apart": prefill_apart, "rate": rate, **in_file, **beyond}
            _refuse(load | budget | others, "cannot be used with gpus (which has tbt)")
            _plan_grids(
                model,
                num_gpus=gpus,
                ttft_s=parse_seconds("ttft", ttft),
                tbt_s=parse_seconds("tbt", tbt),
                context=None if context is None else parse_tokens("context", context),
                server_gpus=gpus_per_server,
                machines=machine or (),
                hardware=hardware,
                top=top,
                **common,
            )
            return
        common |= {"ttft_s": parse_seconds("ttft", ttft, "ms"), "tpot_ms": tpot}
        if prefill_apart is not None or rate is not None:
            others |= {"batch": batch, "context": context, "hardware": hardware}
            others |= in_file | beyond
            _refuse(budget | others, "cannot be used with prefill-apart")
            lengths = prompt, output
            _plan_parted(model, prefill_apart, machine or [], lengths, rate=rate, **common)
            return
        _plan_machines(
            model,
            hardware=hardware,
            machines=machine or (),
            prompt=prompt,
            output=output,
            batches=whole_numbers("batch", batch),
            contexts=parse_token_list("context", context),
            usd_per_h=usd_per_h,
            usd_per_m=usd_per_m,
            disaggregated=disaggregated,
            offload=_offload(in_file),
            weights=_beyond(beyond),
            top=top,
            png_file=png_file,
            **common,
        )


def _plan_machines(model: str, *, batches: Sequence[int] | None, **options: Any) -> None:
    from bench.plan import run

    if not run.run(model, batches=batches or run.BATCHES, **options)["is_served"]:
        raise typer.Exit(NOT_SERVED)


def _offload(options: Mapping[str, Any]) -> KVOffload | None:
    """Returns what the options say of K/V in a file; None if they say nothing."""
    from bench.plan.kv_beyond_memory import KVOffload

    file_bytes, memory_bytes, rate, policy, folder, *of_sequences = options.values()
    for name, value in options.items():
        if value is not None and file_bytes is None and name != "disk-rate":
            raise ConfigError(f"{name} needs kv-offload-bytes")
        if value == 0:
            raise ConfigError(f"{name} must be above 0")
    if file_bytes is None:
        return None
    return KVOffload(file_bytes, memory_bytes, policy or "off", rate, folder, *of_sequences)


def _beyond(options: Mapping[str, Any]) -> Beyond:
    from bench.plan.beyond_memory import Beyond

    for name, value in options.items():
        if value == 0:
            raise ConfigError(f"{name} must be above 0")
    return Beyond(*options.values())


def _refuse(options: Mapping[str, object], why: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"{name} {why}")


def _plan_grids(model: str, **options: Any) -> None:
    """Runs the search of grids; an option that is None has its default."""
    from bench.plan.grid_run import GPUS, run_grids

    given = {name: value for name, value in options.items() if value is not None}
    if "num_gpus" not in given:
        typer.echo(f"--gpus is not given: grids of up to {GPUS} GPUs")
    if not run_grids(model, **given)["is_served"]:
        raise typer.Exit(NOT_SERVED)


def _plan_parted(
    model: str,
    parts: str | None,
    machines: list[str],
    lengths: tuple[int | None, int | None],
    **options: Any,
) -> None:
    """lengths: of prompt and answer; None has its default."""
    from bench.plan.run import OUTPUT, PROMPT
    from bench.simulate.fleet_figures import Mix
    from bench.simulate.parted_plan import parse_parts, run_parted

    if parts is None:
        raise ConfigError("rate needs prefill-apart")
    if len(machines) != 1:
        raise ConfigError("prefill-apart needs exactly one machine")
    prompt, output = lengths
    mix = Mix(PROMPT if prompt is None else prompt, OUTPUT if output is None else output)
    run_parted(model, parse_parts(parts), machine=machines[0], mix=mix, **options)


def _show_known(hardware: Path | None) -> None:
    from bench.plan.hardware import load_devices
    from bench.plan.shapes import known_models
    from bench.plan.tables import print_known

    print_known(known_models(), load_devices(hardware))
