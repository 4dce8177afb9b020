"""Measures the figures of the README's table and writes them there: `make figures`.

Each row is one command of `serve bench` or `serve eval`, run in a process of its own on the code
that is here, one after the other. Above the table stand the commit, the date, the machine and the
ceilings that the machine reached meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench.common.tables import number

BEGIN, END = "<!-- figures: make figures -->\n", "<!-- end of figures -->\n"
LLAMA = "random:llama-1b"
Document = Any


class Row(NamedTuple):
    """One row: what is measured, the command's words after `serve`, and the figure in its JSON."""

    what: str
    command: str
    figure: Callable[[Document], str]
    quick: str | None = None
    """The command of a dry run; None: the same with --quick."""


def _latency(found: Document) -> str:
    rates = found["tokens_per_s"]["ours"]
    shares = found["share_of_bound"]
    decodes = [f"decode_{batch}" for batch in (1, 8, 16, 32) if f"decode_{batch}" in rates]
    prefills = [name for name in ("prefill_512", "prefill_64") if name in rates][:1]
    cells = [f"{number(rates[name])} ({shares[name]:.0%})" for name in decodes + prefills]
    return ", ".join(cells[: len(decodes)]) + "; " + ", ".join(cells[len(decodes) :])


def _linear(found: Document) -> str:
    readings = [r for r in found["readings"] if r["name"] == "int8 linear" and r["share"]]
    return ", ".join(
        f"{r['shape'].split()[0]} {r['share']:.0%} of {r['ceiling']}" for r in readings
    )


def _throughput(found: Document) -> str:
    ours = statistics.median(found["seconds"])
    peer = min(statistics.median(seconds) for seconds in found["peer_seconds"].values())
    return f"{found['over_peer']:.1f}x ({ours:.1f} s against {peer:.1f} s)"


def _perplexity(found: Document) -> str:
    reference, *others = found
    cells = [
        f"{e['precision']} {e['perplexity'] / reference['perplexity'] - 1:+.2%}" for e in others
    ]
    return ", ".join(cells)


def _prefix(found: Document) -> str:
    ways = [value for value in found.values() if isinstance(value, dict) and "ms" in value]
    return ", ".join(f"{statistics.median(way['ms']) / 1e3:.3g} s" for way in ways)


def _capacity(found: Document) -> str:
    capacity = found["capacity"]
    here, nodes = capacity["sequences"]
    share = capacity["tokens_per_s"][1] / capacity["tokens_per_s"][0]
    same = "the same tokens" if capacity["is_same"] else "other tokens"
    return f"{here}; {nodes}, {same} in fp32, at {share:.2f} times the tokens/s"


def _engine(found: Document) -> str:
    warm, cold = found["warm_rows_per_s"], found["cold_rows_per_s"]
    gap_ms = found["paced_between_ms_p50"]
    return f"{warm:,.0f} rows/s ({cold:,.0f} into untouched memory); {gap_ms:.2f} ms"


def _http(found: Document) -> str:
    return f"{found['ratio']:.2f} ({found['http']:,.0f} tokens/s over HTTP)"


def _startup(found: Document) -> str:
    starts = found["starts"].values()
    return ", ".join(
        f"{statistics.median(start['at_s']['/ready'] for start in found):.1f} s" for found in starts
    )


ROWS = (
    Row(
        "Llama-3.2-1B shape in int8: decode at batch 1, 8, 16, 32; prefill of 512"
        " (tokens/s, and the share of what the machine's ceilings allow)",
        f"bench latency {LLAMA}",
        _latency,
        "bench latency random:tiny --quick",
    ),
    Row("int8 linear layers by rows, over the machine's ceiling", "bench ops", _linear),
    Row(
        "16 mixed requests, the 1B shape in bf16, over Transformers (the faster of one padded batch"
        " and one request after the other)",
        f"bench throughput {LLAMA} --requests 16 --output-len 256 --dtype bfloat16"
        " --peer transformers --repeats 1",
        _throughput,
        "bench throughput --quick --peer transformers",
    ),
    Row(
        "perplexity of the built-in model by precision, over fp32",
        "eval",
        _perplexity,
        "eval --max-tokens 512",
    ),
    Row(
        "first token with 4,000 of 4,008 prompt tokens cached, 1B shape:"
        " computed, in memory, on disk",
        "bench prefix-cache",
        _prefix,
    ),
    Row(
        "concurrent sequences: 256 MiB of local K/V; with two memory nodes",
        "bench nodes capacity",
        _capacity,
    ),
    Row(
        "scheduler and engine alone at 256 sequences, with a device that takes no time;"
        " how long a 5 ms device waits between two steps",
        "bench engine",
        _engine,
    ),
    Row(
        "HTTP over in-process throughput, 32 streams, 1B shape in int8",
        f"bench http {LLAMA} --rounds 3",
        _http,
        "bench http random:tiny --quick",
    ),
    Row("the same with the built-in model", "bench http", _http),
    Row(
        "`serve run` to the first HTTP 200 from `/ready`, built-in model: warm, with cold files",
        "bench startup",
        _startup,
    ),
)


def run(row: Row, folder: Path, *, quick: bool) -> Document:
    """The document that the row's command writes; CalledProcessError where it fails."""
    file = folder / "figures.json"
    words = (row.quick or f"{row.command} --quick") if quick else row.command
    command = [sys.executable, "-m", "serve", *words.split(), "--json", str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads(file.read_text())


def heading(documents: list[Document]) -> str:
    """The line above the table: commit, date, machine, versions and ceilings."""
    heads = [found["head"] for found in documents if isinstance(found, dict) and "head" in found]
    readings = [r for found in documents if "readings" in found for r in found["readings"]]
    units = {
        "read": ("read", 1, "GB/s"),
        "i8": ("int8", 1e3, "TOP/s"),
        "bf16": ("bf16", 1e3, "TFLOP/s"),
    }
    ceilings = []
    for name, (what, scale, unit) in units.items():
        limits = [r["limit"] / scale for r in readings if r["ceiling"] == name and r["limit"]]
        if limits:
            ceilings.append(f"{min(limits):.3g} to {max(limits):.3g} {unit} {what}")
    head = heads[0]
    return (
        f"Commit {head['commit']}, {head['began'][:10]}, {head['machine']},"
        f" {head['processors']} processors, torch {head['torch']}."
        f" Ceilings read meanwhile: {', '.join(ceilings)}. Medians.\n"
    )


def table(rows: list[tuple[Row, Document]]) -> str:
    """Markdown: the heading and one line for each row."""
    lines = [heading([found for _, found in rows]), "| what | figure | command |", "|---|---|---|"]
    lines += [
        f"| {row.what} | {row.figure(found)} | `serve {row.command}` |" for row, found in rows
    ]
    return "\n".join(lines) + "\n"


def with_table(page: str, made: str) -> str:
    """The page with the table between its marks; ValueError where it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cli.figures", description=__doc__)
    parser.add_argument("--page", type=Path, default=Path("README.md"))
    parser.add_argument(
        "--only", default="", help="rows whose command holds this; prints them only"
    )
    parser.add_argument("--quick", action="store_true", help="a dry run that prints; no figures")
    args = parser.parse_args()
    rows = [row for row in ROWS if args.only in row.command]
    found: list[tuple[Row, Document]] = []
    with tempfile.TemporaryDirectory(prefix="mergestep-figures-") as folder:
        for place, row in enumerate(rows, 1):
            print(f"{place}/{len(rows)}: serve {row.command}", file=sys.stderr, flush=True)
            found.append((row, run(row, Path(folder), quick=args.quick)))
            print(f"  {row.figure(found[-1][1])}", file=sys.stderr, flush=True)
    if not args.quick and len(rows) == len(ROWS):
        args.page.write_text(with_table(args.page.read_text(), table(found)))


if __name__ == "__main__":
    main()
