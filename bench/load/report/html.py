"""The report as one page: no other file, no network; light, dark, on paper and on a phone."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.load.client.redact import redact
from bench.load.report.gallery import Section, gallery
from bench.load.report.headline import headline, verdict
from bench.load.report.page import GLOSSARY, STYLE
from bench.load.report.plots import Plot, require_matplotlib, svg
from bench.load.report.terminal import (
    count_text,
    interval,
    number,
    share,
    verdict_texts,
    with_interval,
)
from bench.load.results.document import Measurement
from bench.load.results.metrics import LABELS, RATES, STATS
from bench.load.results.summary import RateSummary
from serve.errors import ConfigError

MAX_DETAILED = 3
_CLASSES = {"bold red": "bad", "yellow": "warn", "dim": "note"}


def write_html(path: Path, made: Measurement) -> None:
    require_matplotlib()
    try:
        path.write_text(page(made), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def page(made: Measurement) -> str:
    sections = gallery(made, max_detailed=MAX_DETAILED)
    drawn = {section.rate.qps: section for section in sections if section.rate is not None}
    body = [
        _head(made),
        _overview(made),
        *(_figures(section) for section in sections if section.rate is None),
        *(_rate(made, rate, drawn.get(rate.qps)) for rate in made.rates),
        _settings(made),
        f'<section><h2>What the words mean</h2><dl class="words">{_terms()}</dl></section>',
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>serve bench: {_text(headline(made))}</title>\n<style>{STYLE}</style></head>\n"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _text(value: Any) -> str:
    """What comes from outside: without secrets, and never markup."""
    return html.escape(redact(str(value)))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are markup already; the first of a row names it."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    lines = [
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    ]
    return (
        f'<div class="wide"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _head(made: Measurement) -> str:
    """The command's words are not broken at their hyphens."""
    kind, words = verdict(made)
    words_of = " ".join(f"<span>{html.escape(word)}</span>" for word in made.command.split(" "))
    command = f'<pre class="command">{words_of}</pre>' if made.command else ""
    return (
        f'<header><p class="verdict {kind}">{_text(words)}</p><h1>serve bench</h1>'
        f"<p>{_text(headline(made))}</p>{command}</header>"
    )


def _tile(name: str, value: str, below: str = "") -> str:
    small = f"<small>{below}</small>" if below else ""
    return f'<div class="tile"><span>{name}</span><b>{value}</b>{small}</div>'


def _overview(made: Measurement) -> str:
    """The most important figures; a table of the rates where there are several."""
    parts = []
    if made.search is not None:
        parts.append(f'<p class="found">{_text(made.search)}</p>')
    if len(made.rates) == 1:
        parts.append(f'<div class="tiles">{_tiles(made, made.rates[0])}</div>')
    elif made.rates:
        parts.append(_rates_table(made))
    return f"<section>{''.join(parts)}</section>"


def _tiles(made: Measurement, rate: RateSummary) -> str:
    tiles = [_tile("FAILED", rate.failed_text)] if rate.failed_text else []
    if made.slo is not None and rate.attainment is not None:
        met = f"{100 * rate.attainment.value:.1f} %"
        tiles.append(_tile("within the SLO", met, _text(made.slo)))
    for name, label in (
        ("ttft_schedule", "TTFT from schedule"),
        ("tpot", "TPOT"),
        ("e2e_schedule", "E2E from schedule"),
    ):
        if name in rate.latencies_ms:
            stats = rate.latencies_ms[name]
            p99 = f"p99 {number(stats['p99'].value)} ms"
            tiles.append(_tile(label, f"{number(stats['p50'].value)} ms", f"median; {p99}"))
    for name in ("requests_per_s", "output_tokens_per_s"):
        if name in rate.rates:
            tiles.append(_tile(RATES[name], number(rate.rates[name].value)))
    return "".join(tiles)


def _rates_table(made: Measurement) -> str:
    shown = [(m, p) for m in ("ttft_schedule", "tpot", "e2e_schedule") for p in ("p50", "p99")]
    head = ["offered/s", "answers/s", "output tokens/s"]
    head += [f"{metric.partition('_')[0].upper()} {stat}, ms" for metric, stat in shown]
    if made.slo is not None:
        head.append("within the SLO")
    rows = []
    for place, rate in enumerate(made.rates):
        name = f'<a href="#rate-{place}">{number(rate.qps)}</a>'
        cells = [name if rate.is_valid else f"{name}&nbsp;(invalid)"]
        cells[0] += f"<br><small>{rate.failed_text}</small>" if rate.failed_text else ""
        for key in ("requests_per_s", "output_tokens_per_s"):
            cells.append(number(rate.rates[key].value) if key in rate.rates else "-")
        for metric, stat in shown:
            stats = rate.latencies_ms.get(metric)
            cells.append("-" if stats is None else number(stats[stat].value))
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


def _rate(made: Measurement, rate: RateSummary, section: Section | None) -> str:
    place = made.rates.index(rate)
    title = section.title if section is not None else number(rate.qps)
    parts = [f'<section id="rate-{place}"><h2>{_text(title)}</h2>']
    for style, texts in verdict_texts(rate).items():
        parts += [f'<p class="{_CLASSES[style]}">{_text(text)}</p>' for text in texts]
    parts.append(_latency_table(rate))
    parts.append(f"<p>{_text(count_text(rate.counts))}.</p>")
    parts.append(_rate_figures(made, rate))
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
        cells = [LABELS[name], *(number(stats[stat].value) for stat in STATS)]
        rows.append([*cells, interval(stats["p50"]), interval(stats["p99"])])
    head = ["milliseconds", *STATS, "p50, 95 % interval", "p99, 95 % interval"]
    return _table(head, rows)


def _rate_figures(made: Measurement, rate: RateSummary) -> str:
    rows = []
    if math.isfinite(rate.qps):
        rows.append(("requests/s offered; sent", f"{rate.qps:g}; {rate.achieved_qps:.4g}"))
    rows += [
        (label, with_interval(rate.rates[name]))
        for name, label in RATES.items()
        if name in rate.rates
    ]
    if made.slo is not None and rate.attainment is not None and rate.goodput is not None:
        rows.append((f"within the SLO ({_text(made.slo)})", share(rate.attainment)))
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
            f"{1000 * health.loop_lag_p99_s:.2f}",
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


def _settings(made: Measurement) -> str:
    machine = dict(made.machine)
    packages = machine.pop("packages", {})
    machine["packages"] = ", ".join(f"{name} {version}" for name, version in packages.items())
    machine["memory_gib"] = f"{machine.get('memory_gib')} GiB"
    rows = [(_text(name), _text(value)) for name, value in made.settings.items()]
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
