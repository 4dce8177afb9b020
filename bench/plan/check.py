"""`serve plan --check`: compares predictions with measured steps on this machine.

The machine's ceilings are read before and after every step of a real model (random weights of
Llama-3.2-1B's shape). The step is predicted from their mean, so the comparison holds although the
machine's speed drifts. The report shows medians of times and of ratios. A step during which the
ceilings change by more than 15 % is repeated; if the ceilings are steady in no repeat, the row has
a mark.

A step is at its limit if the bound, which no software can beat, is at least LIMIT of the
prediction. Little depends on the kernels then, and the prediction must be within 25 %. Elsewhere
the shares of the peaks that the kernels reach decide.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.common.ceilings import MAX_DRIFT, Ceiling
from bench.common.checkpoints import random_checkpoint
from bench.plan.cost import Machine, MachineCost
from bench.plan.efficiency import BOUND, expected
from bench.plan.hardware import READ_BYTES, device_of
from bench.plan.rig import StepRig, rig_config
from bench.plan.shapes import Precision, Shape, load_shape
from serve.scheduler.step_time import StepWork

LIMIT = 0.75
TOLERANCE = 0.25
DTYPES = ("int8", "bfloat16")
_MIN_REPEATS, _MAX_REPEATS, _CASE_S = 3, 5, 0.5
_MORE_REPEATS = 2  # if the ceilings are not steady
_QUICK_REPEATS = 1


class Case(NamedTuple):
    """A step with `batch` decode rows, each after `context` tokens, and a chunk (rows, context)."""

    name: str
    batch: int = 0
    context: int = 0
    chunk: tuple[int, int] | None = None

    def rows_and_contexts(self) -> tuple[str, str]:
        """Returns the rows and the contexts of decode and chunk as texts for a table."""
        pairs = [(self.batch, self.context)] if self.batch else []
        pairs += [self.chunk] if self.chunk else []
        rows, contexts = zip(*pairs, strict=True)
        return " + ".join(map(str, rows)), " + ".join(map(str, contexts))


CASES = (
    *(
        Case("decode", batch, context)
        for context in (64, 512, 2048)
        for batch in (1, 8, 16, 32, 64)
    ),
    Case("prefill", chunk=(512, 0)),
    Case("prefill", chunk=(512, 1536)),
    Case("prefill", chunk=(128, 512)),
    Case("mixed", 8, 512, (248, 256)),
    Case("mixed", 32, 512, (224, 256)),
    Case("mixed", 32, 2048, (64, 1024)),
)
QUICK = (Case("decode", 1, 64), Case("decode", 4, 64), Case("mixed", 2, 64, (64, 32)))


@dataclass(frozen=True, slots=True)
class CheckedStep:
    """The medians of one case, in seconds. ratio is predicted over measured, where each step is
    predicted from its own ceilings; limit is bound over predicted; drift is between the ceilings
    before and after. stages are those of the last prediction by name. read and i8 are the ceilings
    in bytes and operations per second."""

    dtype: str
    case: Case
    measured_s: float
    predicted_s: float
    bound_s: float
    ratio: float
    limit: float
    drift: float
    binds: str
    stages: dict[str, float]
    read: float
    i8: float

    @property
    def is_at_limit(self) -> bool:
        return self.limit >= LIMIT

    @property
    def is_steady(self) -> bool:
        return self.drift <= MAX_DRIFT


def run_and_report(*, quick: bool = False, model: Path | None = None) -> list[CheckedStep]:
    """Measures the steps and prints a table and a line of JSON. quick takes a tiny model and three
    steps."""
    path = model or random_checkpoint("tiny" if quick else "llama-1b")
    cases, repeats = (QUICK, _QUICK_REPEATS) if quick else (CASES, None)
    console = Console()
    console.width = max(console.width, 110)
    checked: list[CheckedStep] = []
    for dtype in DTYPES:
        rows = check(path, dtype, cases, repeats)
        report(rows, console)
        checked += rows
    steps = [asdict(row) | {"case": row.case._asdict()} for row in checked]
    print(json.dumps({"model": path.name, "steps": steps}))
    return checked


def check(
    path: Path, dtype: str, cases: Sequence[Case], repeats: int | None = None
) -> list[CheckedStep]:
    """Checks each case. Each step runs `repeats` times, by default as often as fits into _CASE_S. A
    step between two readings that differ by more than MAX_DRIFT is repeated, and does not count if
    another repeat is steady."""
    kv = "int8" if dtype == "int8" else "bfloat16"
    precision, shape = Precision(dtype, kv), load_shape(str(path))
    longest = max(sum(case.chunk or (case.context, 1)) for case in cases) + 16
    tokens = max(case.batch * (case.context + 32) for case in cases) + 2 * longest
    room = int(1.2 * tokens * shape.kv_token_bytes(precision)) + (64 << 20)
    buffer = torch.ones(READ_BYTES, dtype=torch.uint8)
    watched = Console(stderr=True)
    is_hidden = not watched.is_terminal
    with StepRig(rig_config(path, dtype, room, longest)) as rig:
        return [
            _check_case(rig, case, shape, precision, buffer, repeats)
            for case in track(cases, dtype, console=watched, transient=True, disable=is_hidden)
        ]


def _check_case(
    rig: StepRig,
    case: Case,
    shape: Shape,
    precision: Precision,
    buffer: torch.Tensor,
    repeats: int | None,
) -> CheckedStep:
    plan = rig.open([case.context] * case.batch, [case.chunk] if case.chunk else [])
    work = StepWork.of(plan)
    once_s = max(rig.seconds(plan), rig.seconds(plan))  # the first maps pages
    repeats = repeats or max(_MIN_REPEATS, min(_MAX_REPEATS, int(_CASE_S / once_s)))
    rows: list[CheckedStep] = []
    before = Ceiling.now(buffer)
    while len(rows) < repeats + _MORE_REPEATS and sum(row.is_steady for row in rows) < repeats:
        measured_s = rig.seconds(plan)
        after = Ceiling.now(buffer)
        rows.append(_compare(case, work, measured_s, (before, after), shape, precision))
        before = after
    rig.close(plan)
    steady = [row for row in rows if row.is_steady]
    return _medians(steady or [min(rows, key=lambda row: row.drift)])


def _compare(
    case: Case,
    work: StepWork,
    measured_s: float,
    around: tuple[Ceiling, Ceiling],
    shape: Shape,
    precision: Precision,
) -> CheckedStep:
    before, after = around
    ceiling = before.mean(after)
    machine = Machine(device_of(ceiling))
    cost = MachineCost(shape, precision, machine, expected("cpu", precision))
    predicted_s = cost.seconds(work)
    bound_s = MachineCost(shape, precision, machine, BOUND).seconds(work)
    return CheckedStep(
        dtype=precision.weights,
        case=case,
        measured_s=measured_s,
        predicted_s=predicted_s,
        bound_s=bound_s,
        ratio=predicted_s / measured_s,
        limit=bound_s / predicted_s,
        drift=before.drift(after),
        binds=cost.binds(work),
        stages={stage.name: stage.seconds for stage in cost.stages(work) if stage.seconds},
        read=ceiling.read,
        i8=ceiling.i8,
    )


def _medians(rows: list[CheckedStep]) -> CheckedStep:
    last = rows[-1]
    names = [name for name in last.__slots__ if isinstance(getattr(last, name), float)]
    middle: dict[str, Any] = {
        name: statistics.median(getattr(row, name) for row in rows) for name in names
    }
    return replace(last, **middle)


def report(rows: Sequence[CheckedStep], console: Console) -> None:
    """Prints the table of one dtype."""
    table = Table(
        *("step", "rows", "context", "measured", "predicted", "error", "bound"),
        *("mostly", "GB/s", "TOP/s"),
        title=f"{rows[0].dtype}: steps on this machine, milliseconds",
        caption="error: median over the repeats, each with its own ceilings. bound: its share of "
        f"the measured time. *: at its limit, the bound is at least {LIMIT:.0%} of the prediction. "
        "?: the ceilings were not steady",
    )
    for row in rows:
        error = row.ratio - 1
        colour = "green" if abs(error) <= TOLERANCE else "red" if row.is_at_limit else "yellow"
        table.add_row(
            row.case.name,
            *row.case.rows_and_contexts(),
            f"{1e3 * row.measured_s:.1f}",
            f"{1e3 * row.predicted_s:.1f}",
            f"[{colour}]{error:+.0%}[/{colour}]{'' if row.is_steady else ' ?'}",
            f"{row.bound_s / row.measured_s:.0%}{' *' if row.is_at_limit else ''}",
            row.binds,
            f"{row.read / 1e9:.0f}",
            f"{row.i8 / 1e12:.2f}",
        )
    console.print(table)
    limited = [row for row in rows if row.is_at_limit and row.is_steady]
    within = sum(abs(row.ratio - 1) <= TOLERANCE for row in limited)
    console.print(
        f"{within} of the {len(limited)} steady steps at their limit are within {TOLERANCE:.0%}"
    )


def main() -> None:
    run_and_report()


if __name__ == "__main__":
    main()
