"""`serve plan --prefill-apart`: several equal servers, with prompts apart from answers and without.

The same Poisson arrivals of equal calls run through simulated servers (fleet.py) in three ways:
every call at one server, all prompts at some of them, and as `serve front` decides. A hand-over
takes HAND_OVER_S, and the K/V of the tokens that are left to pull over the machines' network.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

from rich.console import Console
from rich.table import Table

from bench.plan.cost import MachineCost
from bench.plan.hardware import Link
from bench.simulate.fleet import FleetCall, FleetRecord, FleetSimulation, HandOver, Way
from bench.simulate.fleet_figures import Figures, Mix, Slo, figures, poisson, seen_of
from bench.simulate.machine import SimulatedMachine, simulated_machine
from bench.simulate.noise import USUAL, NoisyCost
from serve.errors import ConfigError

WAYS: tuple[Way, ...] = get_args(Way)
SHARES = 0.5, 0.8
"""The rates without --rate, as shares of what merged servers can do."""
NUM_CALLS = 300
HAND_OVER_S = 0.02
TTFT_TIMES, TPOT_TIMES = 4.0, 2.0
"""The objectives without --ttft and --tpot, as multiples of what a single call takes."""
_LINK = Link(1.25e9, 5e-5)  # 10 Gbit/s
_SERVERS = re.compile(r"([0-9]{1,2}):([0-9]{1,2})")
_MOST_SERVERS = 32
_WAITING = 128  # calls of a server that shows what it can do
_COLUMNS = (
    *("calls/s", "", "TTFT p50, ms", "p99", "TPOT p50, ms", "p99", "in the SLO, /s", "parted"),
)


class Parts(NamedTuple):
    """The servers that compute prompts, and those that decode."""

    prefill: int
    decode: int


@dataclass(frozen=True, slots=True)
class Row:
    """A way at a rate. num_parted: calls that two servers shared; None where that is fixed."""

    way: Way
    rate: float
    figures: Figures
    num_parted: int | None

    def as_json(self) -> dict[str, Any]:
        found = {"way": self.way, "rate": self.rate, "num_parted": self.num_parted}
        return found | self.figures._asdict()


def parse_parts(text: str) -> Parts:
    """Reads PREFILL:DECODE. Raises ConfigError."""
    matched = _SERVERS.fullmatch(text)
    parts = Parts(*map(int, matched.groups())) if matched else Parts(0, 0)
    if not (parts.prefill and parts.decode and sum(parts) <= _MOST_SERVERS):
        raise ConfigError(
            f"prefill-apart must be PREFILL:DECODE, such as 1:1, of up to {_MOST_SERVERS} servers,"
            f" not {text!r}"
        )
    return parts


class _Fleet:
    """Runs calls of one mix."""

    def __init__(
        self, machine: SimulatedMachine, hand_over: HandOver, parts: Parts, mix: Mix
    ) -> None:
        self._machine = machine
        self._hand_over = hand_over
        self._parts = parts
        self._mix = mix

    def run(self, calls: list[FleetCall], way: Way) -> tuple[list[FleetRecord], int]:
        """Returns the calls' records, and how many calls two servers shared."""
        cost = self._machine.cost
        assert isinstance(cost, MachineCost), "checked"
        simulation = FleetSimulation(
            NoisyCost(cost, *USUAL),
            self._machine.settings,
            self._hand_over,
            way,
            sum(self._parts),
            num_prefill=self._parts.prefill,
            warm_up=[FleetCall(0.0, self._mix.prompt, min(32, self._mix.output))],
        )
        records = simulation.run(calls)
        return records, simulation.parting.counts.num_moved

    def capacity(self) -> float:
        """Returns the calls a second that merged servers end when many wait."""
        calls = [FleetCall(0.0, *self._mix)] * (_WAITING * sum(self._parts))
        records, _ = self.run(calls, "merged")
        return len(calls) / max(record.times[-1] for record in records)

    def slo(self, ttft_s: float | None, tpot_s: float | None) -> Slo:
        alone = seen_of(self.run([FleetCall(0.0, *self._mix)], "merged")[0][0])
        return Slo(ttft_s or TTFT_TIMES * alone.ttft_s, tpot_s or TPOT_TIMES * alone.tpot_s)

    def rows(self, rate: float, slo: Slo) -> list[Row]:
        calls = poisson(self._mix, rate, NUM_CALLS / rate, 1)
        found = []
        for way in WAYS:
            records, num_moved = self.run(calls, way)
            seen = [seen_of(record) for record in records]
            shown = figures(seen, slo, NUM_CALLS / rate)
            found.append(Row(way, rate, shown, num_moved if way == "auto" else None))
        return found


def run_parted(
    model: str,
    parts: Parts,
    *,
    machine: str,
    mix: Mix,
    dtype: str = "int8",
    kv_dtype: str = "auto",
    rate: float | None = None,
    ttft_s: float | None = None,
    tpot_ms: float | None = None,
    json_file: Path | None = None,
) -> dict[str, Any]:
    """Prints the three ways at one rate, or at SHARES of what merged servers can do, and returns
    them as they are written to json_file. Raises ConfigError that names the wrong argument."""
    for name, value in (("rate", rate), ("ttft", ttft_s), ("tpot", tpot_ms)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} must be above 0 and finite, not {value}")
    if min(mix) < 2:
        raise ConfigError(f"prompt and output must be at least 2, not {mix}")
    engine = {"dtype": dtype, "kv_dtype": kv_dtype, "max_model_len": sum(mix)}
    simulated = simulated_machine(model, machine, engine)
    if not isinstance(simulated.cost, MachineCost):
        raise ConfigError(f"prefill-apart needs a machine of the table, or here, not {machine!r}")
    device = simulated.cost.machine.device
    link = device.network or _LINK
    token_bytes = sum(group.token_bytes for group in simulated.settings.groups)
    hand_over = HandOver(HAND_OVER_S + link.seconds, token_bytes / link.bytes_per_s)
    fleet = _Fleet(simulated, hand_over, parts, mix)
    slo = fleet.slo(ttft_s, None if tpot_ms is None else tpot_ms / 1e3)
    capacity = fleet.capacity()
    rates = [share * capacity for share in SHARES] if rate is None else [rate]
    rows = [row for one in rates for row in fleet.rows(one, slo)]
    notes = [*simulated.notes, f"merged servers can do {capacity:.3g} calls a second"]
    if device.network is None:
        notes.append(f"{device.name} has no network in the table: 10 Gbit/s is assumed")
    _show(model, machine, parts, mix, slo, rows, notes)
    result = {
        "model": model,
        "machine": machine,
        "prefill": parts.prefill,
        "decode": parts.decode,
        "prompt": mix.prompt,
        "output": mix.output,
        "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s},
        "capacity": capacity,
        "rows": [row.as_json() for row in rows],
        "notes": notes,
    }
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"json {json_file}: {error.strerror or error}") from error
    return result


def _show(
    model: str,
    machine: str,
    parts: Parts,
    mix: Mix,
    slo: Slo,
    rows: list[Row],
    notes: list[str],
) -> None:
    console = Console()
    console.width = max(console.width, 100)
    title = f"{model}, {sum(parts)} servers of {machine}, calls of {mix} tokens, simulated"
    table = Table(title=title)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if not name else "right")
    for row in rows:
        found, parted = row.figures, "" if row.num_parted is None else str(row.num_parted)
        shown = [f"{found.ttft_p50:.0f}", f"{found.ttft_p99:.0f}"]
        shown += [f"{found.tpot_p50:.1f}", f"{found.tpot_p99:.1f}", f"{found.qps:.3g}"]
        name = f"apart {parts.prefill}:{parts.decode}" if row.way == "apart" else row.way
        table.add_row(f"{row.rate:.3g}", name, *shown, parted, end_section=row.way == WAYS[-1])
    console.print(table)
    ttft_ms, tpot_ms = 1e3 * slo.ttft_s, 1e3 * slo.tpot_s
    console.print(f"SLO: {ttft_ms:.0f} ms to the first token, {tpot_ms:.1f} ms a token")
    for note in notes:
        console.print(note, highlight=False)
