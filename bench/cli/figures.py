"""Measures the figures of the README and of docs/ and writes them there: `make figures`.

Each row of the README's table is one command of `serve bench` or `serve eval`. Above the table
stand the commit, the date, the machine and the ceilings that the machine reached meanwhile. A page
of docs/ names the commands whose reports it shows in marks (see REPORT), and the printed report
replaces what stands between them.

Every command runs in a process of its own on the code that is here, one after the other. What was
measured is kept in build/figures/COMMIT, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from bench.common.tables import number

REPORT = re.compile(r"<!-- report: (?P<command>.+?) -->\n.*?<!-- end of report -->\n", re.DOTALL)
BEGIN, END = "<!-- figures: make figures -->\n", "<!-- end of figures -->\n"
LLAMA = "random:llama-1b"
COLUMNS = "100"  # the width of a printed report
Document = Any


class Row(NamedTuple):
    """One row: what is measured, the command's words after `serve`, and the figure in its JSON."""

    what: str
    command: str
    figure: Callable[[Document], str]


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
    starts = [each for name, each in found["starts"].items() if name != "first"]
    return ", ".join(
        f"{statistics.median(start['at_s']['/ready'] for start in each):.1f} s" for each in starts
    )


ROWS = (
    Row(
        "Llama-3.2-1B shape in int8: decode at batch 1, 8, 16, 32; prefill of 512"
        " (tokens/s, and the share of what the machine's ceilings allow)",
        f"bench latency {LLAMA}",
        _latency,
    ),
    Row("int8 linear layers by rows, over the machine's ceiling", "bench ops", _linear),
    Row(
        "16 mixed requests, the 1B shape in bf16, over Transformers (the faster of one padded batch"
        " and one request after the other)",
        f"bench throughput {LLAMA} --requests 16 --output-len 256 --dtype bfloat16"
        " --peer transformers --repeats 1",
        _throughput,
    ),
    Row(
        "perplexity of the built-in model by precision, over fp32",
        "eval",
        _perplexity,
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
    ),
    Row("the same with the built-in model", "bench http", _http),
    Row(
        "`serve run` to the first HTTP 200 from `/ready`, built-in model: warm, with cold files",
        "bench startup",
        _startup,
    ),
)


class Result(NamedTuple):
    """What a command printed, the JSON it wrote (None for `python -m`), and a line that says how
    long it took, at which commit and when."""

    text: str
    document: Document
    origin: str


def measure(command: str, folder: Path) -> Result:
    """Runs "serve ..." or "python -m ...", unless its result is in `folder` already. Raises
    CalledProcessError if the command fails."""
    name = re.sub(r"\W+", "-", command)
    text_file, json_file = folder / f"{name}.txt", folder / f"{name}.json"
    if not text_file.exists():
        program, *words = shlex.split(command)
        words = ["-m", program, *words, "--json", str(json_file)] if program == "serve" else words
        folder.mkdir(parents=True, exist_ok=True)
        began_s = time.monotonic()
        process = subprocess.run(
            [sys.executable, *words],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"COLUMNS": COLUMNS},
        )
        origin = f"{time.monotonic() - began_s:.0f} s, commit {_commit()}, {date.today()}"
        text_file.write_text(f"{origin}\n{process.stdout}")
    origin, _, text = text_file.read_text().partition("\n")
    document = json.loads(json_file.read_text()) if json_file.exists() else None
    return Result(text, document, origin)


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


def commands_of(page: str) -> list[str]:
    """Returns the commands whose reports a page shows."""
    return [match["command"] for match in REPORT.finditer(page)]


def with_reports(page: str, results: Mapping[str, Result]) -> str:
    """Returns the page with the report of each of its commands between the command's marks."""

    def block(match: re.Match[str]) -> str:
        command = match["command"]
        result = results[command]
        printed = [line.rstrip() for line in result.text.splitlines()]
        lines = [line for line in printed if not line.startswith(("{", "[{"))]  # JSON
        report = "\n".join([f"$ {command}   # {result.origin}", *lines]).rstrip()
        return f"<!-- report: {command} -->\n```text\n{report}\n```\n<!-- end of report -->\n"

    return REPORT.sub(block, page)


def _commit() -> str:
    """Returns the name of the commit that is measured, with "-dirty" if the tree has changes."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cli.figures", description=__doc__)
    parser.add_argument(
        "--only", default="", help="measure and print this command, or all that contain this"
    )
    args = parser.parse_args()
    readme = Path("README.md")
    pages = [page for page in sorted(Path("docs").glob("*.md")) if REPORT.search(page.read_text())]
    commands = [f"serve {row.command}" for row in ROWS]
    commands += [command for page in pages for command in commands_of(page.read_text())]
    exact = [command for command in commands if command == args.only]
    commands = exact[:1] or [c for c in dict.fromkeys(commands) if args.only in c]
    commit = _commit()
    if commit.endswith("-dirty"):
        sys.exit("figures are of a commit: commit the changes of this tree first")
    folder = Path("build/figures") / commit
    results: dict[str, Result] = {}
    for index, command in enumerate(commands, 1):
        print(f"{index}/{len(commands)}: {command}", file=sys.stderr, flush=True)
        results[command] = measure(command, folder)
        print(results[command].text, flush=True)
    if args.only:
        return
    rows = [(row, results[f"serve {row.command}"].document) for row in ROWS]
    readme.write_text(with_table(readme.read_text(), table(rows)))
    for page in pages:
        page.write_text(with_reports(page.read_text(), results))


if __name__ == "__main__":
    main()
