"""What leaving out neurons would gain for a trained model's shares, over the kernels and the disk.

Shares are those of a checkpoint (live_neurons.py), and times those of a gated MLP in int8 of the
size that is asked for. There is no kernel that leaves out neurons: the time is that of the dense
kernels with so many neurons, so that what finding and gathering them takes is left out, in favour
of leaving out. Ways to know which neurons are live:

    gate first   all of the gate's product, then live rows of up and columns of down: exact
    predictor    a predictor that finds 99 % of them, then their rows and columns: not exact
    for nothing  no way at all, a bound of all ways: the live rows and columns alone
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import torch
from rich.table import Table
from torch import Tensor

from bench.streaming.live_neurons import BATCH, PANEL, Liveness
from ops.backend import Fusion, LinearOp
from ops.cpu.native_quantized_linear import NATIVE

MLP_SHARE = 0.65  # of the bytes that a step of Llama 3.2 1B reads (805 of 1,236 million weights)
GATED = Fusion(None, "relu", is_gated=True)
_REPEATS = 60
_CACHE_BYTES = 96 << 20  # more than the last cache holds
Run = Callable[[Tensor], Tensor]


def fastest(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Returns the least seconds of each. All take turns, and the least is taken, since other work
    on the machine hits long runs more often than short ones, which medians count as a gain."""
    times = dict.fromkeys(runs, float("inf"))
    for _ in range(_REPEATS):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            times[name] = min(times[name], time.perf_counter() - began)
    return times


def product(num_out: int, num_in: int, fusion: Fusion) -> LinearOp:
    return NATIVE.int8([torch.randn(num_out, num_in) / num_in**0.5], None, fusion)


def cold(make: Callable[[], Run], num_bytes: int) -> Run:
    """Returns copies of a product in turn, so that none is in a cache when it is used again."""
    copies = [make() for _ in range(max(2, _CACHE_BYTES // num_bytes))]
    turns = iter(range(1 << 30))
    return lambda x: copies[next(turns) % len(copies)](x)


def gated(hidden: int, count: int) -> Run:
    def make() -> Run:
        up = NATIVE.int8([torch.randn(count, hidden) for _ in range(2)], None, GATED)
        down = product(hidden, count, Fusion())
        return lambda x: down(up(x))

    return cold(make, 3 * hidden * count)


def plain(hidden: int, count: int) -> Run:
    """Up and down of neurons whose gates are there."""

    def make() -> Run:
        up, down = product(count, hidden, Fusion()), product(hidden, count, Fusion())
        return lambda x: down(up(x))

    return cold(make, 2 * hidden * count)


def chosen_shares(layers: Sequence[Liveness], rows: int) -> dict[str, float]:
    """Returns the shares of neurons that each way computes with, of all layers."""
    at = 0 if rows == 1 else 1
    live = fmean(each.one if rows == 1 else each.eight for each in layers)
    predicted = [each.predicted[1] if rows == 1 else each.predicted_eight for each in layers]
    return {
        "gate first, neighbours": live,
        "gate first, panels": fmean(each.panels[at] for each in layers),
        "gate first, panels by heat": fmean(each.sorted_panels[at] for each in layers),
        "predictor, neighbours": fmean(predicted),
        "for nothing, neighbours": live,
    }


def memory_rows(
    layers: Sequence[Liveness], hidden: int, size: int, rank: int, rows: int
) -> list[list[str]]:
    """Returns a row of the table of each way, for a step of so many rows."""
    x = torch.randn(rows, hidden)
    shares = chosen_shares(layers, rows)
    gate = cold(lambda: product(size, hidden, Fusion(None, "relu")), hidden * size)
    low, high = product(rank, hidden, Fusion()), product(size, rank, Fusion())
    parts: dict[str, Run] = {"dense": gated(hidden, size), "gate": gate}
    parts["predictor"] = lambda x: high(low(x))
    for name, part in shares.items():
        count = min(size, max(PANEL, PANEL * round(part * size / PANEL)))
        parts[name] = (plain if name.startswith("gate") else gated)(hidden, count)
    times = fastest({name: bound(run, x) for name, run in parts.items()})
    return [
        gain_row(name, f"memory, {rows}", part, cost(name, times) / times["dense"])
        for name, part in shares.items()
    ]


def bound(run: Run, x: Tensor) -> Callable[[], object]:
    return lambda: run(x)


def cost(name: str, times: Mapping[str, float]) -> float:
    """Returns the seconds of a way, with what it takes to know the live neurons."""
    knowing = {"gate first": "gate", "predictor": "predictor"}.get(name.partition(",")[0])
    return times[name] + (times[knowing] if knowing is not None else 0.0)


def disk_rows(layers: Sequence[Liveness], read_cost: Callable[[float], float]) -> list[list[str]]:
    """Returns rows for MLPs on the disk. read_cost: the time of reading a share of the neurons, one
    by one, over that of reading all of them in large pieces."""
    rows = []
    for where, part in (
        ("disk, 1", fmean(each.one for each in layers)),
        ("disk, 1, not in the last 5", fmean(each.fresh for each in layers)),
        (f"disk, {BATCH}", fmean(each.eight for each in layers)),
    ):
        spent = read_cost(part)
        rows.append(gain_row("gate first", where, part, (1 + 2 * spent) / 3))
        rows.append(gain_row("for nothing", where, part, spent))
    return rows


def gain_row(way: str, where: str, part: float, spent: float) -> list[str]:
    """spent: the MLP's time over the dense one's."""
    whole = 1 / (1 - MLP_SHARE + MLP_SHARE * spent)
    return [way, where, f"{part:.0%}", f"{spent:.0%}", f"{whole:.2f}x"]


def gain_table(rows: Sequence[list[str]]) -> Table:
    table = Table("live neurons known by", "from, rows", "neurons", "of dense MLP", "step")
    for row in rows:
        table.add_row(*row)
    return table


def liveness_table(layers: Sequence[Liveness]) -> Table:
    """Shares of a layer's neurons, as in `Liveness`."""
    table = Table(
        "layer",
        "live",
        "of 8 rows",
        "panels, 1 and 8",
        "by heat",
        "in last 5",
        "not in last 5",
        "for 95 %",
        "99 %",
        "99 %, 8 rows",
    )
    for number, each in enumerate(layers):
        pair = (f"{one:.0%} {eight:.0%}" for one, eight in (each.panels, each.sorted_panels))
        single = (each.window, each.fresh, *each.predicted, each.predicted_eight)
        cells = f"{each.one:.1%}", f"{each.eight:.0%}", *pair, *(f"{one:.0%}" for one in single)
        table.add_row(str(number), *cells)
    return table
