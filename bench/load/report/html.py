"""The report as one HTML page that needs no other file and no network."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.common.plot_style import require_matplotlib
from bench.load.client.redact import redact
from bench.load.report.gallery import Section, gallery
from bench.load.report.plots import Plot
from bench.load.report.terminal import (
    count_text,
    headline,
    interval,
    number,
    share,
    tail_text,
    verdict,
    verdict_texts,
    with_interval,
)
from bench.load.report.write_pictures import svg
from bench.load.results.document import Measurement
from bench.load.results.metrics import LABELS, RATES, STATS
from bench.load.results.summary import RateSummary
from serve.errors import ConfigError

MAX_DETAILED = 3
_CLASSES = {"bold red": "bad", "yellow": "warn", "dim": "note"}
GLOSSARY = (
    ("from schedule", "counted from when a request was due, including its wait in the client"),
    ("from send", "counted from when the request was given to the socket or engine"),
    ("TTFT", "time to first token: until the first piece of text"),
    ("TPOT", "time per output token: (last text - first text) / (tokens - 1), for each request"),
    ("ITL", "gap before each token after the first, if the tokens of each chunk are known"),
    ("ICL", "gap between chunks of text; a chunk may hold several tokens"),
    ("E2E", "until the last piece of text"),
    ("queue", "client: from due to sent; server: until first scheduled, as the server reports"),
    ("goodput", "requests within all limits of the SLO; failed and incomplete ones are misses"),
    ("interval", "95 %: Student's t over runs, or the interval of a single run's sample"),
)

STYLE = """
:root { color-scheme: light dark; --paper: #fefefe; --panel: #f6f8fa; --ink: #1f2328;
  --muted: #59636e; --grid: #d8dee4; --blue: #0072b2; --orange: #e69f00; --green: #009e73;
  --vermillion: #d55e00; --purple: #b8578f; --sky: #56b4e9; --on: #ffffff }
@media screen and (prefers-color-scheme: dark) { :root { --paper: #14181d; --panel: #1d232a;
  --ink: #e6eaef; --muted: #9aa5b1; --grid: #353d46; --blue: #4ba3dd; --orange: #f0b43c;
  --green: #35c79b; --vermillion: #f58345; --purple: #e08fc0; --sky: #8fd0f5; --on: #14181d } }
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif }
main { max-width: 1000px; margin: 0 auto; padding: 20px 16px 60px }
h1 { font-size: 26px; margin: 6px 0 }
h2 { font-size: 20px; margin: 40px 0 10px; border-bottom: 1px solid var(--grid) }
h3 { font-size: 16px; margin: 26px 0 4px }
p { margin: 6px 0 }
a { color: var(--blue) }
.verdict { display: inline-block; padding: 3px 12px; border-radius: 14px; font-weight: 600;
  color: var(--on); background: var(--green) }
.verdict.invalid { background: var(--vermillion) }
.verdict.warned { background: var(--orange); color: #1f2328 }
.command { background: var(--panel); padding: 10px 12px; border-radius: 6px; font-size: 13px;
  white-space: pre-wrap; overflow-wrap: anywhere }
.command span { display: inline-block; max-width: 100% }
.found { font-size: 18px; font-weight: 600 }
.bad, .warn { border-left: 4px solid var(--vermillion); padding: 4px 10px;
  background: var(--panel) }
.warn { border-color: var(--orange) }
.note, figcaption, small { color: var(--muted); font-size: 13px }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px;
  margin-top: 14px }
.tile { background: var(--panel); border-radius: 8px; padding: 10px 12px }
.tile span, .tile small { display: block; color: var(--muted); font-size: 13px }
.tile b { font-size: 22px; font-weight: 600 }
.wide { overflow-x: auto }
table { border-collapse: collapse; margin: 10px 0; font-size: 14px;
  font-variant-numeric: tabular-nums }
th, td { padding: 4px 10px; text-align: right; border-bottom: 1px solid var(--grid);
  white-space: nowrap }
th[scope=row] { text-align: left; font-weight: 500; white-space: normal }
thead th { color: var(--muted); font-weight: 500; vertical-align: bottom; white-space: normal }
thead th:first-child { text-align: left }
.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere }
figure { margin: 0 }
figure svg { display: block; width: 100%; min-width: 640px; height: auto }
figure svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans",
  sans-serif !important }
summary { cursor: pointer; margin-top: 14px }
.words dt { font-weight: 600 } .words dd { margin: 0 0 6px 0 }
@media (min-width: 700px) { .words { display: grid; grid-template-columns: 130px 1fr } }
@media print { main { max-width: none; padding: 0 } figure, table, .tiles { break-inside: avoid }
  h2, h3 { break-after: avoid } figure svg { min-width: 0 }
  .verdict, .tile, .command { print-color-adjust: exact; -webkit-print-color-adjust: exact } }
"""


def write_html(path: Path, measurement: Measurement) -> None:
    require_matplotlib()
    try:
        path.write_text(page(measurement), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def page(measurement: Measurement) -> str:
    """Returns the report as an HTML document."""
    sections = gallery(measurement, max_detailed=MAX_DETAILED)
    by_rate = {section.rate.qps: section for section in sections if section.rate is not None}
    body = [
        _head(measurement),
        _overview(measurement),
        *(_figures(section) for section in sections if section.rate is None),
        *(_rate(measurement, rate, by_rate.get(rate.qps)) for rate in measurement.rates),
        _settings(measurement),
        f'<section><h2>What the words mean</h2><dl class="words">{_terms()}</dl></section>',
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>serve bench: {_text(headline(measurement))}</title>\n"
        f"<style>{STYLE}</style></head>\n"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _text(value: Any) -> str:
    """Escapes a value and removes secrets."""
    return html.escape(redact(str(value)))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table. The cells are markup; the first of each row is its header."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    lines = [
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    ]
    return (
        f'<div class="wide"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _head(measurement: Measurement) -> str:
    """Returns the page's head, in which the command's words do not break at hyphens."""
    kind, words = verdict(measurement)
    words_of = " ".join(
        f"<span>{html.escape(word)}</span>" for word in measurement.command.split(" ")
    )
    command = f'<pre class="command">{words_of}</pre>' if measurement.command else ""
    return (
        f'<header><p class="verdict {kind}">{_text(words)}</p><h1>serve bench</h1>'
        f"<p>{_text(headline(measurement))}</p>{command}</header>"
    )


def _tile(name: str, value: str, below: str = "") -> str:
    small = f"<small>{below}</small>" if below else ""
    return f'<div class="tile"><span>{name}</span><b>{value}</b>{small}</div>'


def _overview(measurement: Measurement) -> str:
    """Returns the most important figures of one rate, or a table of several rates."""
    parts = []
    if measurement.search is not None:
        parts.append(f'<p class="found">{_text(measurement.search)}</p>')
    if len(measurement.rates) == 1:
        parts.append(f'<div class="tiles">{_tiles(measurement, measurement.rates[0])}</div>')
    elif measurement.rates:
        parts.append(_rates_table(measurement))
    return f"<section>{''.join(parts)}</section>"


def _tiles(measurement: Measurement, rate: RateSummary) -> str:
    tiles = [_tile("FAILED", rate.failed_text)] if rate.failed_text else []
    if measurement.slo is not None and rate.attainment is not None:
        met = f"{100 * rate.attainment.value:.1f} %"
        tiles.append(_tile("within the SLO", met, _text(measurement.slo)))
    for name, label in (
        ("ttft_schedule", "TTFT from schedule"),
        ("tpot", "TPOT"),
        ("e2e_schedule", "E2E from schedule"),
    ):
        if name in rate.latencies_ms:
            stats = rate.latencies_ms[name]
            tail = rate.tail_ms(name)
            p99 = f"{tail.label} {number(tail.value)} ms"
            tiles.append(_tile(label, f"{number(stats['p50'].value)} ms", f"median; {p99}"))
    for name in ("requests_per_s", "output_tokens_per_s"):
        if name in rate.rates:
            tiles.append(_tile(RATES[name], number(rate.rates[name].value)))
    return "".join(tiles)


def _rates_table(measurement: Measurement) -> str:
    shown = [(m, p) for m in ("ttft_schedule", "tpot", "e2e_schedule") for p in ("p50", "p99")]
    head = ["offered/s", "answers/s", "output tokens/s"]
    head += [f"{metric.partition('_')[0].upper()} {stat}, ms" for metric, stat in shown]
    if measurement.slo is not None:
        head.append("within the SLO")
    rows = []
    for index, rate in enumerate(measurement.rates):
        name = f'<a href="#rate-{index}">{number(rate.qps)}</a>'
        cells = [name if rate.is_valid else f"{name}&nbsp;(invalid)"]
        cells[0] += f"<br><small>{rate.failed_text}</small>" if rate.failed_text else ""
        for key in ("requests_per_s", "output_tokens_per_s"):
            cells.append(number(rate.rates[key].value) if key in rate.rates else "-")
        cells += [tail_text(rate, metric, stat) for metric, stat in shown]
        if rate.attainment is not None:
            cells.append(f"{100 * rate.attainment.value:.1f} %")
        rows.append(cells)
    return f"<h2>All rates</h2>{_table(head, rows)}"


def _figures(section: Section) -> str:
    return f"<section>{''.join(_figure(plot) for plot in section.plots)}</section>"


def _figure(plot: Plot) -> str:
    note = f"<figcaption>{_text(plot.note)}</figcaption>" if plot.note else ""
    return (
        f'<figure id="figure-{plot.name}"><h3>{_text(plot.title)}</h3>'
        f'<div class="wide">{svg(plot)}</div>{note}</figure>'
    )


def _rate(measurement: Measurement, rate: RateSummary, section: Section | None) -> str:
    index = measurement.rates.index(rate)
    title = section.title if section is not None else number(rate.qps)
    parts = [f'<section id="rate-{index}"><h2>{_text(title)}</h2>']
    for style, texts in verdict_texts(rate).items():
        parts += [f'<p class="{_CLASSES[style]}">{_text(text)}</p>' for text in texts]
    parts.append(_latency_table(rate))
    parts.append(f"<p>{_text(count_text(rate.counts))}.</p>")
    parts.append(_rate_figures(measurement, rate))
    if rate.errors:
        rows = [(_text(error), str(count)) for error, count in list(rate.errors.items())[:20]]
        parts.append(_table(["error", "times"], rows))
    if section is not None:
        parts += [_figure(plot) for plot in section.plots]
        if section.note:
            parts.append(f'<p class="note">{_text(section.note)}</p>')
    parts.append(_health(rate))
    return "".join(parts) + "</section>"


def _latency_table(rate: RateSummary) -> str:
    rows = []
    for name, stats in rate.latencies_ms.items():
        cells = [LABELS[name], f"{stats['count'].value:,.0f}"]
        cells += [number(stats[stat].value) for stat in STATS]
        rows.append([*cells, interval(stats["p50"]), interval(stats["p99"])])
    head = ["milliseconds", "n", *STATS, "p50, 95 % interval", "p99, 95 % interval"]
    return _table(head, rows)


def _rate_figures(measurement: Measurement, rate: RateSummary) -> str:
    rows = []
    if math.isfinite(rate.qps):
        rows.append(("requests/s offered; sent", f"{rate.qps:g}; {rate.achieved_qps:.4g}"))
    rows += [
        (label, with_interval(rate.rates[name]))
        for name, label in RATES.items()
        if name in rate.rates
    ]
    if measurement.slo is not None and rate.attainment is not None and rate.goodput is not None:
        rows.append((f"within the SLO ({_text(measurement.slo)})", share(rate.attainment)))
        rows.append(("goodput, requests/s", with_interval(rate.goodput)))
    what = "this run" if len(rate.runs) == 1 else f"mean of {len(rate.runs)} runs (95 % interval)"
    return _table(["", what], rows)


def _health(rate: RateSummary) -> str:
    rows = [
        (
            f"run {run.seed}, process {health.process}",
            f"{health.num_requests:,}",
            f"{100 * health.cpu:.0f} %",
            "-" if math.isnan(health.core_wait) else f"{100 * health.core_wait:.0f} %",
            f"{1000 * health.loop_lag_p50_s:.2f}",
            number(1000 * health.loop_lag_p99_s),
            f"{1000 * health.loop_lag_max_s:.2f}",
            str(health.num_collections),
            str(health.max_connections),
        )
        for run in rate.runs
        for health in run.health
    ]
    if not rows:
        return ""
    head = [
        "client",
        "requests",
        "CPU",
        "waited for a core",
        "loop lag p50, ms",
        "p99",
        "max",
        "collections",
        "sockets",
    ]
    return f"<details><summary>Client processes</summary>{_table(head, rows)}</details>"


def _settings(measurement: Measurement) -> str:
    machine = dict(measurement.machine)
    packages = machine.pop("packages", {})
    machine["packages"] = ", ".join(f"{name} {version}" for name, version in packages.items())
    machine["memory_gib"] = f"{machine.get('memory_gib')} GiB"
    rows = [(_text(name), _text(value)) for name, value in measurement.settings.items()]
    client = [
        (_text(name.removesuffix("_gib")), _text(value)) for name, value in machine.items() if value
    ]
    settings = f"<h2>Settings</h2>{_table(['setting', 'value'], rows)}" if rows else ""
    return (
        f'<section class="facts">{settings}<h2>The client\'s machine</h2>'
        f"{_table(['', ''], client)}</section>"
    )


def _terms() -> str:
    return "".join(f"<dt>{_text(name)}</dt><dd>{_text(text)}</dd>" for name, text in GLOSSARY)
