"""`python -m bench.mnemosyne`: prints the table, the fit, and with --check the measured stages."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.mnemosyne.paper import chunk_ratio, figure_17, fit_exchange_s, fit_fixed_s
from bench.mnemosyne.rows import Row, all_rows
from bench.plan.grid import EXCHANGE_S
from bench.simulate.stage_check import compare, load_measured, show, show_fits
from serve.errors import MergestepError

NOT_MET = 3  # exit code


def main() -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.mnemosyne",
        description="Published figures of Mnemosyne beside predictions of the simulator.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the curves to this file")
    parser.add_argument(
        "--check",
        type=Path,
        metavar="FILE",
        help="compare measured runs of stages (bench/simulate/stage_check.py) instead",
    )
    parser.add_argument(
        "--measure",
        type=Path,
        metavar="FILE",
        help="measure such runs on this machine, write them to this file, and compare them",
    )
    parser.add_argument("--model", default="llama-1b", help="shape of the random checkpoint")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="short runs, for tests")
    args = parser.parse_args()
    try:
        if args.measure is not None:
            _measure(args)
            return _check(args.measure)
        if args.check is not None:
            return _check(args.check)
        return _run(args)
    except MergestepError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    rows = all_rows()
    console = Console()
    console.width = max(console.width, 120)
    report(rows, console)
    if args.json is not None:
        texts = [row._asdict() | {"verdict": row.verdict} for row in rows]
        args.json.write_text(json.dumps(texts, indent=2) + "\n", encoding="utf-8")
    if args.svg is not None:
        from bench.mnemosyne.picture import draw

        draw(args.svg)
    return 0 if all(row.is_met for row in rows) else NOT_MET


def _measure(args: argparse.Namespace) -> None:
    from bench.common.checkpoints import random_checkpoint
    from bench.simulate.measure_stages import FULL, QUICK, measure

    model = random_checkpoint(args.model)
    found = measure(model, args.stages, QUICK if args.quick else FULL)
    args.measure.write_text(json.dumps(found) + "\n", encoding="utf-8")


def _check(file: Path) -> int:
    cost, runs = load_measured(file)
    show_fits(cost)
    found = compare(cost, runs)
    show(found)
    return 0 if all(one.is_within for one in found) else NOT_MET


def report(rows: list[Row], console: Console) -> None:
    """Prints the table, the arithmetic of each row, and how the constant was fitted."""
    table = Table(
        *("", "figure", "published", "predicted", "criterion", "verdict"),
        title="Mnemosyne (arXiv 2409.17264) and bench/plan/grid.py: H100 DGX, tp 8, bf16",
    )
    for number, row in enumerate(rows, start=1):
        colour = "yellow" if not row.is_met else "green" if row.kind == "must match" else "default"
        cells = (row.what, row.published, row.predicted, row.criterion)
        table.add_row(str(number), *cells, f"[{colour}]{row.verdict}[/{colour}]")
    console.print(table)
    for number, row in enumerate(rows, start=1):
        console.print(f"{number:2}. {row.why}", highlight=False)
    fitted, fixed_s = fit_exchange_s(), fit_fixed_s()
    found, other = figure_17(fitted), figure_17(0.0, fixed_s)
    console.print(
        f"The constant: {1e6 * fitted:.0f} µs a layer for K/V on other holders, fitted to figure 17"
        f" ({found.saved:.0%}, {found.speedup:.2f}x, {found.tokens_per_s:.1f}/s);"
        f" {1e6 * EXCHANGE_S:.0f} µs are used. A fixed time of every step instead fits with"
        f" {1e3 * fixed_s:.1f} ms ({other.saved:.0%}, {other.speedup:.2f}x,"
        f" {other.tokens_per_s:.1f}/s), but then chunks of 32 would cost"
        f" {chunk_ratio(fixed_s):.1f}x and not 1.75x: 31,250 steps of {1e3 * fixed_s:.1f} ms are"
        f" {31250 * fixed_s:.0f} s.",
        highlight=False,
    )


if __name__ == "__main__":
    sys.exit(main())
