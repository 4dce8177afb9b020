"""`serve plan`: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.common.cli_options import whole_numbers
from serve.cli.reporting import reported, set_up_logging
from serve.config import DEFAULT_MODEL

_WANTED = "What is wanted"
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
            help="One to see in detail, several to compare (repeat it): a name (--list), 4xNAME,"
            " or here (measured). By default all are compared.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Weights: int8, int4, nf4, fp8, bfloat16 or float32.")
    ] = "int8",
    kv_dtype: Annotated[str, typer.Option(help="K/V: auto, int8, bfloat16 or float32.")] = "auto",
    prompt: Annotated[
        int | None, typer.Option(help="Tokens of a prompt; 1024.", rich_help_panel=_WANTED)
    ] = None,
    output: Annotated[
        int | None, typer.Option(help="And of an answer; 256.", rich_help_panel=_WANTED)
    ] = None,
    ttft: Annotated[
        float | None,
        typer.Option(help="Most ms to a first token.", rich_help_panel=_WANTED),
    ] = None,
    tpot: Annotated[
        float | None,
        typer.Option(help="Most ms from token to token.", rich_help_panel=_WANTED),
    ] = None,
    usd_per_h: Annotated[
        float | None,
        typer.Option("--usd-per-hour", help="Most dollars an hour.", rich_help_panel=_WANTED),
    ] = None,
    usd_per_m: Annotated[
        float | None,
        typer.Option(
            "--usd-per-million",
            help="Most dollars for a million tokens of answers.",
            rich_help_panel=_WANTED,
        ),
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help="Of the table of one machine, with commas.")
    ] = None,
    context: Annotated[str | None, typer.Option(help="Likewise, tokens.")] = None,
    disaggregated: Annotated[
        bool,
        typer.Option("--disaggregated", help="Also compute devices beside memory devices."),
    ] = False,
    top: Annotated[int, typer.Option(help="Rows of the comparison.")] = 15,
    hardware: Annotated[
        Path | None,
        typer.Option(help="A TOML file with more devices, or other figures of those known."),
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="Name the models and machines that are known.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Predictions for this machine beside measured steps."),
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write it all here.")] = None,
    png_file: Annotated[Path | None, typer.Option("--png", help="Draw it here.")] = None,
) -> None:
    """What MODEL can do on machines, and which to buy: from sizes and peaks.

    Exit code 3: no machine serves what is wanted."""
    set_up_logging("warning")
    with reported():
        if show_list:
            _show_known(hardware)
            return
        if check:
            from bench.plan.check import run_and_report

            run_and_report(model=None if model == DEFAULT_MODEL else Path(model))
            return
        from bench.plan import run

        result = run.run(
            model,
            hardware=hardware,
            machines=machine or (),
            dtype=dtype,
            kv_dtype=kv_dtype,
            prompt=prompt,
            output=output,
            batches=whole_numbers("batch", batch) or run.BATCHES,
            contexts=whole_numbers("context", context),
            ttft_s=None if ttft is None else ttft / 1e3,
            tpot_ms=tpot,
            usd_per_h=usd_per_h,
            usd_per_m=usd_per_m,
            disaggregated=disaggregated,
            top=top,
            json_file=json_file,
            png_file=png_file,
        )
        if not run.is_served(result):
            raise typer.Exit(NOT_SERVED)


def _show_known(hardware: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from bench.plan.hardware import load_devices
    from bench.plan.shapes import known_models
    from bench.plan.tables import marked, print_meanings

    console = Console()
    console.print("models: " + ", ".join(known_models()), highlight=False)
    table = Table("machine", "memory, GB", "GB/s", "TOP/s or TFLOP/s", "$/h", title="machines")
    for name, device in load_devices(hardware).items():
        peaks = ", ".join(f"{kind} {peak / 1e12:g}" for kind, peak in device.operations.items())
        price = "" if device.dollars_per_h is None else f"{device.dollars_per_h:g}"
        sizes = [f"{value / 1e9:,.0f}" for value in (device.memory_bytes, device.bytes_per_s)]
        table.add_row(marked(device, name), *sizes, peaks, price)
    console.print(table)
    print_meanings(load_devices(hardware).values(), False, console)
