"""The tables of `serve plan`. Assumed figures have the mark ~, and machines that this software does
not drive have one of MARKS."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from bench.plan.capacity import kv_bytes, max_sequences, max_tokens
from bench.plan.cost import MachineCost
from bench.plan.hardware import Device
from bench.plan.search import Choice, SplitChoice
from bench.plan.serving import MAX_ROWS, Load, decode_work, prefill_s
from bench.plan.shapes import Shape

NONE = "–"
MARKS = {"cuda": " †", "none": " ‡"}  # by back end, behind a machine's name
ASSUMED = "~"  # before a figure
_MEANINGS = {
    ASSUMED: "assumed, not measured: the device's peaks are those of its data sheet, and the shares"
    " of them that kernels reach are guesses on a GPU and those of two Zen 5 cores on a processor",
    MARKS["cuda"]: "not driven yet: the CUDA back end has never run on a GPU",
    MARKS["none"]: "not driven: this software has no back end for it",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """A decode step. fits means that memory holds `batch` sequences of this context."""

    batch: int
    context: int
    expected_s: float
    bound_s: float
    binds: str
    fits: bool

    def as_json(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "context": self.context,
            "step_s": self.expected_s,
            "tokens_per_s": self.batch / self.expected_s,
            "bound_step_s": self.bound_s,
            "bound_tokens_per_s": self.batch / self.bound_s,
            "binds": self.binds,
            "fits": self.fits,
        }


@dataclass(frozen=True, slots=True)
class Details:
    """The decode steps of one machine, and prompts as (tokens, expected seconds, bound seconds)."""

    cost: MachineCost
    cells: list[Cell]
    prompts: list[tuple[int, float, float]]

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": self.cost.machine.name,
            "backend": self.cost.machine.device.backend,
            "is_assumed": self.cost.is_assumed,
            "weight_bytes": self.cost.shape.weight_bytes(self.cost.precision),
            "kv_bytes": kv_bytes(self.cost),
            "kv_token_bytes": self.cost.shape.kv_token_bytes(self.cost.precision),
            "state_bytes": self.cost.shape.state_bytes,
            "max_tokens": max_tokens(self.cost),
            "decode": [cell.as_json() for cell in self.cells],
            "prefill": [
                {"tokens": tokens, "seconds": seconds, "bound_seconds": bound_s}
                for tokens, seconds, bound_s in self.prompts
            ],
        }


def details(
    cost: MachineCost, bound: MachineCost, batches: Sequence[int], contexts: Sequence[int]
) -> Details:
    """Returns a machine's decode steps and prompts with their expected cost and their bound. Both
    lists are empty if the weights do not fit."""
    if kv_bytes(cost) <= 0:
        return Details(cost, [], [])
    rows = MAX_ROWS[cost.machine.device.kind]
    cells = []
    for batch in batches:
        for context in contexts:
            work = decode_work(batch, context)
            cells.append(
                Cell(
                    batch,
                    context,
                    cost.seconds(work),
                    bound.seconds(work),
                    cost.binds(work),
                    max_sequences(cost, context + 1) >= batch,
                )
            )
    prompts = [
        (length, prefill_s(cost, length, rows), prefill_s(bound, length, length))
        for length in contexts
    ]
    return Details(cost, cells, prompts)


def print_known(models: Iterable[str], devices: Mapping[str, Device]) -> None:
    """Prints the models and machines that have a name."""
    console = Console()
    console.print("models: " + ", ".join(models), highlight=False)
    table = Table("machine", "memory, GB", "GB/s", "TOP/s or TFLOP/s", "$/h", title="machines")
    for name, device in devices.items():
        peaks = ", ".join(f"{kind} {peak / 1e12:g}" for kind, peak in device.operations.items())
        price = "" if device.dollars_per_h is None else f"{device.dollars_per_h:g}"
        sizes = [f"{value / 1e9:,.0f}" for value in (device.memory_bytes, device.bytes_per_s)]
        table.add_row(marked(device, name), *sizes, peaks, price)
    console.print(table)
    print_meanings(devices.values(), False, console)


def print_details(
    detailed: Details, load: Load, console: Console, *, is_beyond: bool = False
) -> None:
    """Prints a machine's memory, decode steps and prompts. is_beyond: what follows is about weights
    beyond the memory."""
    cost = detailed.cost
    shape, precision, machine = cost.shape, cost.precision, cost.machine
    room, token_bytes = kv_bytes(cost), shape.kv_token_bytes(precision)
    name = marked(machine.device, machine.name)
    console.print(
        f"[bold]{shape.name}[/bold], {_parameters(shape)}, "
        f"{precision.weights} ({gb_text(shape.weight_bytes(precision))}), K/V {precision.kv} "
        f"({token_bytes:,.0f} bytes a token){_state(shape)} on [bold]{name}[/bold] "
        f"({gb_text(machine.num_devices * machine.device.memory_bytes)})",
        highlight=False,
    )
    if room <= 0:
        if not is_beyond:
            console.print("[red]the weights do not fit[/red]")
        print_meanings([machine.device], False, console)
        return
    console.print(
        f"K/V: {gb_text(room)}, {max_tokens(cost):,} tokens or "
        f"{max_sequences(cost, load.context):,} sequences of {load.prompt} + {load.output}",
        highlight=False,
    )
    console.print(_decode_table(detailed))
    tilde = _tilde(cost.is_assumed)
    table = Table(
        *("tokens", "expected, ms", "bound, ms", "tokens/s"),
        title="A prompt alone: time to the first token",
    )
    for tokens, seconds, bound_s in detailed.prompts:
        expected = (
            f"{tilde}{ms_text(seconds)}",
            ms_text(bound_s),
            f"{tilde}{tokens / seconds:,.0f}",
        )
        table.add_row(f"{tokens:,}", *expected)
    console.print(table)
    print_meanings([machine.device], cost.is_assumed, console)


def _state(shape: Shape) -> str:
    """Returns what the state of a sequence takes, if there is one."""
    if not shape.state_bytes:
        return ""
    return f", a state of {shape.state_bytes / 1e6:,.3g} MB a sequence"


def _parameters(shape: Shape) -> str:
    text = f"{shape.num_parameters / 1e9:.3g}B parameters"
    if not shape.mixtures:
        return text
    return f"{text}, {shape.active_parameters / 1e9:.3g}B active"


def _decode_table(detailed: Details) -> Table:
    contexts = sorted({cell.context for cell in detailed.cells})
    table = Table(
        "rows",
        *(f"{context:,} tokens" for context in contexts),
        title="Decode: milliseconds between tokens (bound), tokens/s, what it waits for",
        caption="bound: no software can beat it on these peaks. ✗: memory does not hold the rows",
    )
    for batch in sorted({cell.batch for cell in detailed.cells}):
        row = [cell for cell in detailed.cells if cell.batch == batch]
        row.sort(key=lambda cell: cell.context)
        table.add_row(str(batch), *(_decode_cell(cell, detailed.cost.is_assumed) for cell in row))
    return table


def _decode_cell(cell: Cell, is_assumed: bool) -> str:
    tilde, rate = _tilde(is_assumed), cell.batch / cell.expected_s
    times = f"{tilde}{ms_text(cell.expected_s)} ({ms_text(cell.bound_s)})"
    text = f"{times}  {tilde}{rate:,.0f}/s  {cell.binds}"
    return text if cell.fits else f"[dim]✗ {text}[/dim]"


def print_ranking(choices: Sequence[Choice], load: Load, top: int, console: Console) -> None:
    """Prints the first `top` machines that serve the load, and the others by reason."""
    served = [choice for choice in choices if choice.serving is not None]
    table = Table(
        _names("machine"),
        *("USD/h", "at once", "tokens/s", "req/s", "ms/token", "longest"),
        *("first token", "USD/M", "waits for", "limit"),
        title=f"{load.prompt} + {load.output} tokens a request, the cheapest answers first",
        caption="longest: a step with prompt rows. USD/M: dollars per million output tokens. "
        "limit: what prevents a larger batch",
    )
    for choice in served[:top]:
        serving = choice.serving
        assert serving is not None
        tilde, is_full = _tilde(choice.is_assumed), serving.limit == "memory"
        times = (ms_text(serving.step_s), ms_text(serving.longest_s), f"{serving.ttft_s:.2f} s")
        table.add_row(
            marked(choice.machine.device, choice.machine.name),
            dollars(choice.machine.dollars_per_h),
            f"{'' if is_full else tilde}{serving.batch:,}",
            f"{tilde}{serving.tokens_per_s:,.0f}",
            f"{tilde}{rate_text(serving.requests_per_s)}",
            *(f"{tilde}{time}" for time in times),
            NONE if choice.dollars_per_m is None else tilde + dollars(choice.dollars_per_m),
            serving.binds,
            serving.limit,
        )
    console.print(table if served else "[red]no machine serves this[/red]")
    is_assumed = any(choice.is_assumed for choice in served[:top])
    print_meanings([choice.machine.device for choice in served[:top]], is_assumed, console)
    reasons: dict[str, list[str]] = {}
    for choice in choices:
        if choice.reason is not None:
            reasons.setdefault(choice.reason, []).append(choice.machine.name)
    for reason, names in reasons.items():
        console.print(f"not ({reason}): {', '.join(names)}", highlight=False, style="dim")


def print_splits(choices: Sequence[SplitChoice], top: int, console: Console) -> None:
    """Prints the first `top` pairs of compute and memory devices."""
    table = Table(
        _names("compute, memory"),
        *("USD/h", "at once", "in flight", "tokens/s", "ms/token", "USD/M"),
        *("GB/s used", "available", "required"),
        title="Attention on memory devices, decoding alone: the best (a, b) of each pair",
        caption="GB/s: of all links together; times are those with the available links. required: "
        "the rate at which one batch is a fifth slower",
    )
    for choice in choices[:top]:
        figures = choice.figures
        per_dollar, tilde = figures.tokens_per_dollar, _tilde(choice.is_assumed)
        compute, memory = (marked(one, one.name) for one in (choice.compute, choice.memory))
        table.add_row(
            f"({choice.a} {compute}, {choice.b} {memory})",
            dollars(figures.dollars_per_h),
            f"{tilde}{figures.batch:,.0f}",
            f"{tilde}{figures.in_flight}",
            f"{tilde}{figures.tokens_per_s:,.0f}",
            f"{tilde}{ms_text(figures.step_s)}",
            NONE if per_dollar is None else tilde + dollars(1e6 / per_dollar),
            f"{tilde}{choice.used_bytes_per_s / 1e9:,.0f}",
            f"{choice.network_bytes_per_s / 1e9:,.0f}",
            f"{tilde}{(figures.required_bytes_per_s or 0.0) / 1e9:,.0f}",
        )
    console.print(table if choices else "[red]no pair of devices serves this[/red]")
    devices = [device for choice in choices[:top] for device in (choice.compute, choice.memory)]
    print_meanings(devices, any(choice.is_assumed for choice in choices[:top]), console)


def marked(device: Device, name: str) -> str:
    """Returns the name, with a mark if this software does not drive the device."""
    return name + MARKS.get(device.backend, "")


def print_meanings(devices: Iterable[Device], is_assumed: bool, console: Console) -> None:
    """Prints the meanings of the marks in a table of these devices."""
    for mark, meaning in meanings(devices, is_assumed).items():
        console.print(f"{mark.strip()}: {meaning}", highlight=False, style="dim")


def meanings(devices: Iterable[Device], is_assumed: bool) -> dict[str, str]:
    """Returns the meanings of the marks of these devices and figures by mark."""
    used = {MARKS.get(device.backend, "") for device in devices} | {_tilde(is_assumed)}
    return {mark: meaning for mark, meaning in _MEANINGS.items() if mark in used}


def _tilde(is_assumed: bool) -> str:
    return ASSUMED if is_assumed else ""


def _names(header: str) -> Column:
    """Returns a column that is not wrapped, since a user copies its names."""
    return Column(header, no_wrap=True)


def rate_text(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.2f}"


def gb_text(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.3g} GB"


def ms_text(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def dollars(amount: float | None) -> str:
    """Returns an amount with two decimals, or with two significant digits below 0.10."""
    if amount is None:
        return NONE
    if amount >= 0.1 or amount <= 0:
        return f"{amount:,.2f}"
    return f"{amount:.{1 - floor(log10(amount))}f}"
