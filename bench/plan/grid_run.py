"""`serve plan --gpus`: the grids of GPUs that keep the limits of one long prompt, and which limits
the others miss."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.plan.efficiency import expected
from bench.plan.grid import SERVER_DEVICES
from bench.plan.grid_search import BOUNDS, GridChoice, GridSearch, LongPrompt
from bench.plan.hardware import Device, load_devices
from bench.plan.run import find_precision
from bench.plan.shapes import load_shape
from bench.plan.tables import ASSUMED, NONE, print_meanings
from serve.errors import ConfigError, reason
from serve.units import format_count

DEVICE = "h100-sxm"
CONTEXT = 1_000_000
GPUS, MAX_GPUS = 128, 4096


def run_grids(
    model: str,
    *,
    num_gpus: int = GPUS,
    context: int = CONTEXT,
    ttft_s: float | None = None,
    tbt_s: float | None = None,
    machines: Sequence[str] = (),
    server_gpus: int = SERVER_DEVICES,
    dtype: str = "int8",
    kv_dtype: str = "auto",
    hardware: Path | None = None,
    top: int = 15,
    json_file: Path | None = None,
) -> dict[str, Any]:
    """Prints the best `top` grids of up to num_gpus GPUs, and returns all as they are written to
    json_file. machines names one device of hardware.toml; server_gpus share the links between
    peers. Raises ConfigError that names the wrong argument."""
    for name, value, most in (("gpus", num_gpus, MAX_GPUS), ("gpus-per-server", server_gpus, 1024)):
        if not 1 <= value <= most:
            raise ConfigError(f"{name} must be from 1 to {most}, not {value}")
    if top < 1:
        raise ConfigError(f"top must be at least 1, not {top}")
    shape = load_shape(model)
    if num_gpus > 1:
        shape.require_no_states(f"{num_gpus} GPUs")
    precision = find_precision(dtype, kv_dtype, shape)
    device = _device(machines, hardware)
    search = GridSearch(
        shape,
        precision,
        device,
        expected(device.kind, precision),
        num_gpus=num_gpus,
        server_devices=server_gpus,
    )
    prompt = LongPrompt(context=context, ttft_s=ttft_s or inf, tbt_s=tbt_s or inf)
    choices = search.choices(prompt)
    shown, is_served = search.best(choices, prompt, top)
    console = Console()
    console.width = max(console.width, 120)
    _print(search, prompt, shown, choices, console, is_served=is_served)
    result = {
        "model": shape.name,
        "precision": asdict(precision),
        "device": device.name,
        "num_gpus": num_gpus,
        "prompt": {"context": context, "ttft_s": ttft_s, "tbt_s": tbt_s},
        "is_served": is_served,
        "shown": [choice.as_json() for choice in shown],
        "grids": [choice.as_json() for choice in choices],
    }
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"json {json_file}: {reason(error)}") from error
    return result


def _device(machines: Sequence[str], hardware: Path | None) -> Device:
    devices = load_devices(hardware)
    if len(machines) > 1:
        raise ConfigError(f"machine: gpus are of one kind, not {', '.join(machines)}")
    name = machines[0] if machines else DEVICE
    if name not in devices:
        raise ConfigError(
            f"machine {name!r} is not one of: {', '.join(devices)} (gpus gives the number)"
        )
    return devices[name]


def _print(
    search: GridSearch,
    prompt: LongPrompt,
    shown: Sequence[GridChoice],
    choices: Sequence[GridChoice],
    console: Console,
    *,
    is_served: bool,
) -> None:
    shape, precision, device = search.shape, search.precision, search.device
    console.print(
        f"[bold]{shape.name}[/bold], {precision.weights}, K/V {precision.kv}, "
        f"{format_count(prompt.context)} tokens on up to {search.num_gpus} {device.name} in servers"
        f" of {search.server_devices}",
        highlight=False,
    )
    if prompt.context > shape.max_model_len:
        console.print(
            f"The model is made for {shape.max_model_len:,} tokens; its positions are taken to be"
            " scaled.",
            highlight=False,
        )
    if shown:
        console.print(_table(search, prompt, shown, is_served=is_served))
    if not is_served:
        console.print(f"[red]{_nearest(search, prompt, shown)}[/red]", highlight=False)
    for line in _refusals(choices, prompt):
        console.print(line, highlight=False, style="dim")
    print_meanings([device], not search.efficiency.is_measured, console)


def _table(
    search: GridSearch, prompt: LongPrompt, shown: Sequence[GridChoice], *, is_served: bool
) -> Table:
    tilde = "" if search.efficiency.is_measured else ASSUMED
    title = "The nearest grids"
    if is_served:
        limited = "Grids that keep the limits, the fewest GPUs first"
        title = limited if prompt.is_limited else "Grids, the fastest first"
    table = Table(
        *("tp", "pp", "kvp", "GPUs", "first token", "beside streams", "ms/token", "GB a GPU"),
        *("prompt waits for", "token waits for"),
        *([] if is_served else ["misses"]),
        title=title,
        caption="first token: the prompt alone. beside streams: in chunks that keep the time"
        " between tokens of other requests. Left out: grids that are slower in both on no fewer"
        " GPUs",
    )
    for choice in shown:
        grid = choice.grid
        shared = choice.shared_ttft_s
        table.add_row(
            *(str(number) for number in (grid.tp, grid.spp, grid.kvp, grid.num_devices)),
            f"{tilde}{_seconds(choice.ttft_s)}",
            NONE if shared == inf else f"{tilde}{_seconds(shared)}",
            f"{tilde}{1e3 * choice.tbt_s:.1f}",
            f"{choice.memory_bytes / 1e9:.1f} of {choice.room_bytes / 1e9:.0f}",
            choice.prompt_binds,
            choice.decode_binds,
            *([] if is_served else [choice.reason or ""]),
        )
    return table


def _nearest(search: GridSearch, prompt: LongPrompt, shown: Sequence[GridChoice]) -> str:
    """Returns why no grid keeps the limits."""
    if not shown:
        return f"no grid: the memory of {search.num_gpus} GPUs does not hold this"
    text = f"no grid keeps the limits; the nearest misses {shown[0].reason}"
    least_s = search.least_ttft_s(prompt.context)
    if least_s > prompt.ttft_s:
        most = search.num_gpus * least_s / prompt.ttft_s
        text += (
            f". Attention alone takes {_seconds(least_s)} on {search.num_gpus} GPUs at"
            f" {search.efficiency.prefill:.0%} of their peak: {_seconds(prompt.ttft_s)} need at"
            f" least {most:,.0f} GPUs"
        )
    return text


def _refusals(choices: Sequence[GridChoice], prompt: LongPrompt) -> list[str]:
    """Returns a line for each bound with the grid that misses it least."""
    lines = []
    counts = Counter(choice.reason for choice in choices)
    for name in BOUNDS:
        missed = [choice for choice in choices if choice.reason == name]
        if not missed:
            continue
        nearest = missed[0]
        told = {
            "memory": f"{nearest.memory_bytes / 1e9:,.1f} GB of {nearest.room_bytes / 1e9:.0f} GB a"
            " GPU",
            "ttft": f"{_seconds(nearest.ttft_s)} to the first token, not {_seconds(prompt.ttft_s)}",
            "tbt": f"{1e3 * nearest.tbt_s:.1f} ms between tokens, not {1e3 * prompt.tbt_s:.3g}",
        }[name]
        lines.append(f"not ({name}): {counts[name]} grids, the nearest {nearest.grid}: {told}")
    return lines


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
