"""The load report's page and picture are complete, self-contained and safe to open."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.common.plot_style import VARIABLES
from bench.load.client.record import Outcome, Record, RunResult
from bench.load.report.plots import Plot
from bench.load.report.plots_requests import MIN_LANES, NUM_LANES, lanes_plot
from bench.load.report.plots_time import _rows_in
from bench.load.report.report import report
from bench.load.report.write_pictures import svg
from bench.load.results.columns import Columns
from bench.load.results.search import find_max_qps
from bench.load.results.slo import Slo
from tests.support.engine.load_runs import engine_run, queue_run

VOID = {"meta", "br", "img", "link", "input", "hr"}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


class Page(HTMLParser):
    """Fails on tags that do not nest, and collects links and texts for tests."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == [], "everything is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self._seen(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._seen(tag, attrs)

    def _seen(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            if name == "id":
                self.ids[value or ""] += 1
            elif name in ("href", "src", "xlink:href", "action"):
                self.links.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes {self.open[-3:]}"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def written(tmp_path: Path, runs: list[RunResult], **options: Any) -> str:
    path = tmp_path / "report.html"
    settings = options.pop("settings", {"command": "serve bench --qps 8"})
    report(runs, settings, html_file=path, **options)
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns a measurement of two rates with two seeds each, an SLO and a search."""
    runs = [engine_run(qps, count=60, seed=seed) for qps in (4.0, 8.0) for seed in (1, 2)]
    search = find_max_qps(queue_run, Slo(e2e_s=0.5), attainment=0.9, resolution=0.5)
    slo = Slo(ttft_s=0.2, tpot_s=0.02)
    return written(tmp_path_factory.mktemp("page"), runs, slo=slo, search=search)


KINDS = ("cdf", "timeline", "steps", "lanes", "client")


@pytest.mark.exhaustive
def test_every_plot_is_there(whole):
    page = Page(whole)
    names = ["rates", *(f"{rate}-{kind}" for rate in ("r0", "r1") for kind in KINDS)]
    figures = [name for name in page.ids if name.startswith("figure-")]
    assert figures == [f"figure-{name}" for name in names]
    assert page.tags["svg"] == len(names)


def test_the_page_is_well_formed_and_alone(whole):
    page = Page(whole)
    assert max(page.ids.values()) == 1, "ids are unique over all plots"
    assert {link[0] for link in page.links} == {"#"}
    inner = set(re.findall(r"url\(([^)]*)\)", whole))
    used = {link[1:] for link in page.links} | {target.removeprefix("#") for target in inner}
    assert used <= set(page.ids)
    assert all(target.startswith("#") for target in inner)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    markup = re.sub(r">[^<]*<", "><", whole)  # a server's address is shown as text
    assert "http:" not in markup and "https:" not in markup


def test_colours_are_the_pages(whole):
    drawings = " ".join(re.findall(r"<svg.*?</svg>", whole, flags=re.S))
    assert not [colour for colour in VARIABLES if colour in drawings]
    for name in re.findall(r"var\(--(\w+)\)", whole):
        assert whole.count(f"--{name}:") == 2, "for light and for dark"


def test_the_page_says_what_was_found(whole):
    text = Page(whole).text
    assert "Valid" in text and "serve bench --qps 8" in text
    assert "TTFT 200 ms, TPOT 20 ms, from schedule" in text
    assert "4 requests/s, 2 runs" in text and "max 5.66" in text
    assert "The requests due from" in text and "steps, " in text


def test_what_comes_from_outside_is_text(tmp_path):
    bad = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&amp; $x^2$ {{}}"
    run = engine_run(6.0, count=40)
    run.target = bad
    run.notes = [bad]
    for record in run.records[20:25]:
        record.outcome, record.error = Outcome.FAILED, bad
    settings = {bad: bad, "command": f"serve bench {bad}"}
    page = Page(written(tmp_path, [run], settings=settings))
    assert not {"script", "img"} & set(page.tags)
    assert page.text.count(bad) >= 5


def test_text_in_drawings_is_text():
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.set_title("</text><script>alert(1)</script> $x_1$ -->")

    drawing = svg(Plot("p", 'a "title" <b>', 2.0, draw))
    page = Page(drawing)
    assert "script" not in page.tags and "$x_1$" in page.text


def test_a_run_of_which_nothing_is_known_has_a_page(tmp_path):
    records = [
        Record(i, i / 10, i / 10, i / 10 + 0.01, outcome=Outcome.FAILED, error="refused")
        for i in range(5)
    ]
    failed = RunResult(10.0, 0, "t", records, (0.0, 0.5))
    unsent = RunResult(10.0, 0, "t", [Record(0, 0.0)], (0.0, 1.0))
    for run in (failed, unsent, RunResult(10.0, 0, "t", [], (0.0, 1.0))):
        page = Page(written(tmp_path, [run]))
        assert page.tags["table"]
        report([run], {}, png_file=tmp_path / "a.png")
    assert "INVALID" in page.text


@pytest.mark.parametrize("source", ["samples", "neither"])
def test_servers_that_tell_less(tmp_path, source):
    run = engine_run(6.0, count=40, tokens_known=False)
    run.steps, run.qps = [], math.inf
    run.health = []
    if source == "neither":
        run.samples = []
    page = Page(written(tmp_path, [run]))
    assert page.tags["svg"] == 4
    assert ("running (server)" in page.text) == (source == "samples")
    assert ("K/V use, %" in page.text) == (source == "samples")
    assert "came without a token count" in page.text and "ITL (per token)" not in page.text


def test_lanes_are_those_of_the_busiest_time():
    run = queue_run(5.0, 0, count=400)
    for record in run.records[200:320]:  # a jam
        record.finished_s += 30.0
    plot = lanes_plot("lanes", Columns.of(run))
    assert plot is not None and f"{MIN_LANES} of 400 requests" in plot.note, "else they were dots"
    drawing = svg(plot)
    starts = [float(x) for x in re.findall(r">(\d+)</text>", drawing)]
    due = [record.scheduled_s for record in run.records]
    assert min(starts) > due[100] and len(starts) > 2
    for record in run.records:
        record.finished_s += 30.0
    plot = lanes_plot("lanes", Columns.of(run))
    assert plot is not None and f"{NUM_LANES} of 400 requests" in plot.note


def test_rows_of_steps_are_spread_over_them():
    """Bins of half a step's length show no comb."""
    edges = np.linspace(0.0, 1.0, 21)
    start = np.arange(0.0, 1.0, 0.1)
    rows = _rows_in(edges, start, start + 0.1, np.full(10, 30.0))
    assert rows == pytest.approx(np.full(20, 300.0))
    idle = _rows_in(np.array([0.0, 1.0, 2.0, 3.0]), start[[0]], start[[0]] + 1, np.array([7.0]))
    assert list(idle) == [7, 0, 0]


def test_large_runs_stay_small(tmp_path):
    run = queue_run(9.0, 0, count=20_000)
    text = written(tmp_path, [run], slo=Slo(e2e_s=1.0))
    assert len(text) < 1_500_000
    assert "of 20,000 are drawn" in text and "of 20,000 requests, around" in text


def test_the_png(tmp_path):
    path = tmp_path / "report.png"
    report([engine_run(6.0, count=40)], {}, slo=Slo(ttft_s=0.1), png_file=path)
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(head[i : i + 4]) for i in (16, 20))
    assert width == 1100 and 1500 < height < 4000


@pytest.mark.process
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_chromium_opens_the_page(whole, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(whole, encoding="utf-8")
    done = subprocess.run(
        [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--enable-logging=stderr",
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    drawn = re.findall(r'<figure id="figure-([\w-]+)">.*?</figure>', done.stdout, flags=re.S)
    assert len(drawn) == 1 + 2 * len(KINDS)
    assert done.stdout.count("<svg") == done.stdout.count("</svg>") == len(drawn)
    assert Page(done.stdout).tags["path"] > 500


def test_all_requests_have_lanes_where_they_fit():
    plot = lanes_plot("lanes", Columns.of(queue_run(5.0, 0, count=50, service_s=0.001)))
    assert plot is not None and plot.note == ""


def test_a_limit_outside_the_plot_is_named_and_not_drawn():
    from matplotlib.figure import Figure

    from bench.common.plot_style import horizontal

    axes = Figure().subplots()
    axes.set_ylim(0, 50)
    horizontal(axes, 200, "SLO 200 ms")
    assert [text.get_text() for text in axes.texts] == ["SLO 200 ms: above this plot"]
    assert not axes.lines
    horizontal(axes, 20, "SLO 20 ms")
    assert len(axes.lines) == 1 and axes.texts[1].get_text() == "SLO 20 ms"
