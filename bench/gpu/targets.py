"""The GPU report's targets, with shares of the ceilings of the same run, and its markdown.

The functions are pure, from the JSON of a report to text. A case with `seconds` has the least bytes
and operations that it needs in `bytes` and `operations` (of the type `unit`). Its bound is the
larger of bytes over the bandwidth and operations over the peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Cases = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Ceilings:
    """Measured bytes and operations per second, 0 where they are not known. peaks: by type."""

    copy: float
    read: float
    peaks: dict[str, float]

    @classmethod
    def of(cls, report: dict[str, Any]) -> Ceilings:
        cases = cases_of(report, "ceilings")
        rates = {name: float(case.get("rate", 0.0)) for name, case in cases.items()}
        peaks = {unit: rates.get(unit, 0.0) for unit in ("bf16", "int8", "fp8")}
        return cls(rates.get("copy", 0.0), rates.get("read", 0.0), peaks)

    def copy_share(self, case: dict[str, Any]) -> float | None:
        return _share(case, "bytes", self.copy)

    def read_share(self, case: dict[str, Any]) -> float | None:
        return _share(case, "bytes", self.read)

    def peak_share(self, case: dict[str, Any]) -> float | None:
        return _share(case, "operations", self.peaks.get(str(case.get("unit")), 0.0))

    def bound_share(self, case: dict[str, Any], bandwidth: float | None = None) -> float | None:
        """Returns the share of the bound. bandwidth: that of copying by default."""
        moved = _share(case, "bytes", self.copy if bandwidth is None else bandwidth)
        computed = self.peak_share(case)
        found = [share for share in (moved, computed) if share is not None]
        return max(found, default=None)


def _share(case: dict[str, Any], what: str, ceiling: float) -> float | None:
    if not ceiling or not case.get(what) or not case.get("seconds"):
        return None
    return float(case[what] / ceiling / case["seconds"])


def cases_of(report: dict[str, Any], section: str) -> Cases:
    found: Cases = report["sections"].get(section, {}).get("cases", {})
    return found


@dataclass(frozen=True)
class Row:
    """A target. reached: None if it was not measured."""

    target: str
    measured: str
    reached: bool | None


def _at_least(
    target: str, values: dict[str, float | None], least: float, form: str = "{:.0%}"
) -> Row:
    """Returns a row of all values by name, which is reached if each is at least `least`."""
    known = {name: value for name, value in values.items() if value is not None}
    text = ", ".join(f"{name} {form.format(value)}".strip() for name, value in known.items())
    missing = [name for name in values if name not in known]
    if missing:
        text = f"{text}; not measured: {', '.join(missing)}" if text else "not measured"
        below = any(value < least for value in known.values())
        return Row(target, text, False if below else None)
    return Row(target, text, all(value >= least for value in known.values()))


def targets(report: dict[str, Any]) -> list[Row]:
    """Returns the targets on an H200 in their order, with what the report has of them."""
    ceilings = Ceilings.of(report)
    linear, attention = cases_of(report, "linear"), cases_of(report, "attention")
    engine = cases_of(report, "engine-8b")

    def shares(
        of: Cases, names: dict[str, str], share: Callable[[dict[str, Any]], float | None]
    ) -> dict[str, float | None]:
        return {label: share(of.get(name, {})) for label, name in names.items()}

    small = {
        f"{layer} M={rows}": f"int8 {layer} M={rows}"
        for rows in (16, 1)
        for layer in ("qkv", "o", "up", "down", "head")
    }
    middle = {layer: f"int8 {layer} M=64" for layer in ("qkv", "o", "up", "down", "head")}
    rows = [
        _at_least(
            "int8 GEMM 8192x4096x4096: 60 % of the int8 peak",
            shares(linear, {"": "int8 8192x4096x4096"}, ceilings.peak_share),
            0.6,
        ),
        _at_least(
            "int8 GEMM, M = 64: 60 % of its bound (bytes or operations)",
            shares(linear, middle, ceilings.bound_share),
            0.6,
        ),
        _at_least(
            "int8 GEMM, M <= 16: 80 % of copy bandwidth",
            shares(linear, small, ceilings.copy_share),
            0.8,
        ),
        _at_least(
            "decoding attention int8 K/V, batch 64, context 4k: 80 % of copy bandwidth",
            shares(attention, {"": "decode int8 64 x 4096"}, ceilings.copy_share),
            0.8,
        ),
        _at_least(
            "the same: 1.6x FlashInfer or SDPA on bf16 K/V",
            {"": _over_rivals(attention, "decode int8 64 x 4096", "rival decode 64 x 4096")},
            1.6,
            "{:.2f}x",
        ),
        _at_least(
            "prefill attention 8k causal bf16: 60 % of the bf16 peak",
            {"": _best_share(ceilings, attention, _PREFILLS)},
            0.6,
        ),
        *_engine_rows(ceilings, engine),
        _at_least(
            "against Transformers (its best mode) at 64 streams: 8x",
            {"": _over_peer(engine, cases_of(report, "transformers"))},
            8.0,
            "{:.1f}x",
        ),
        _tests_row(cases_of(report, "tests")),
    ]
    return rows


def _engine_rows(ceilings: Ceilings, engine: Cases) -> list[Row]:
    def decode(batch: int) -> float | None:
        return ceilings.bound_share(engine.get(f"decode {batch}", {}), ceilings.read)

    decode_64 = engine.get("decode 64", {})
    late = decode_64.get("late_growth_steps")
    text = "not measured" if late is None else f"{late} of {decode_64.get('steps')}"
    gap = decode_64.get("gap_share")
    return [
        _at_least("8B decode, batch 1, 1k context: 75 % of the bound", {"": decode(1)}, 0.75),
        _at_least("8B decode, batch 64, 1k context: 65 % of the bound", {"": decode(64)}, 0.65),
        _at_least(
            "8B prefill of 8k tokens: 45 % of the int8 peak",
            {"": ceilings.peak_share(engine.get("prefill 8192", {}))},
            0.45,
        ),
        Row(
            "gap between steps on the device (decode, batch 64): under 3 % of the step",
            "not measured" if gap is None else f"{gap:.2%}",
            None if gap is None else gap < 0.03,
        ),
        Row(
            "page growth on the critical path: 0 steps later than 3 %",
            text,
            None if late is None else late == 0,
        ),
    ]


def _over_rivals(cases: Cases, ours: str, rivals: str) -> float | None:
    """Returns the speedup over the fastest case whose name begins with the prefix."""
    times = [
        case["seconds"]
        for name, case in cases.items()
        if name.startswith(rivals) and case.get("seconds")
    ]
    own = cases.get(ours, {}).get("seconds")
    return min(times) / own if times and own else None


# The kinds of prefill attention that the engine may choose, over its own tiles.
_PREFILLS = ("prefill 8192 own bf16", "prefill 8192 library bf16")


def _best_share(ceilings: Ceilings, cases: Cases, names: Iterable[str]) -> float | None:
    shares = [ceilings.peak_share(cases.get(name, {})) for name in names]
    return max((share for share in shares if share is not None), default=None)


def _over_peer(engine: Cases, peer: Cases) -> float | None:
    ours = engine.get("streams 64", {}).get("tokens_per_s")
    theirs = [case["tokens_per_s"] for case in peer.values() if case.get("tokens_per_s")]
    return ours / max(theirs) if ours and theirs else None


def _tests_row(cases: Cases) -> Row:
    counts = cases.get("counts", {})
    if not counts:
        return Row("the engine's and the kernels' tests pass on CUDA", "not run", None)
    failed, passed = counts.get("failed", 0), counts.get("passed", 0)
    done = bool(counts.get("is_complete"))
    text = f"{passed} passed, {failed} failed, {counts.get('skipped', 0)} skipped"
    reached = False if failed else (True if done and passed else None)
    text += "" if done else ", ended before all had run"
    return Row("the engine's and the kernels' tests pass on CUDA", text, reached)


# ---- markdown


def markdown(report: dict[str, Any]) -> str:
    """Returns the whole report: targets, figures of all sections, failures."""
    dry = " (dry run: the figures mean nothing)" if report.get("is_dry_run") else ""
    lines = [
        f"# GPU report: {report['device']}{dry}",
        "",
        f"{report['when']}, {report['seconds']:.0f} s in all. Written by `make gpu`.",
        "",
        "| target | measured | reached |",
        "|---|---|---|",
    ]
    words = {True: "yes", False: "**no**", None: "?"}
    for row in targets(report):
        lines.append(f"| {_cell(row.target)} | {_cell(row.measured)} | {words[row.reached]} |")
    ceilings = Ceilings.of(report)
    for name, entry in report["sections"].items():
        lines += ["", f"## {name}: {entry['status']}, {entry['seconds']:.0f} s", ""]
        lines += _cases_table(ceilings, entry.get("cases", {}))
    return "\n".join([*lines, *_failures(report)])


def _cases_table(ceilings: Ceilings, cases: Cases) -> list[str]:
    if not cases:
        return ["Nothing was measured."]
    lines = ["| case | time | of copy | of peak | of bound | more |", "|---|---|---|---|---|---|"]
    for name, case in cases.items():
        shares = (
            ceilings.copy_share(case),
            ceilings.peak_share(case),
            ceilings.bound_share(case),
        )
        cells = [_cell(name), _time(case.get("seconds")), *map(_percent, shares), _more(case)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


_SHOWN_ELSEWHERE = {"seconds", "bytes", "operations", "unit"}


def _more(case: dict[str, Any]) -> str:
    parts = [
        f"{name.replace('_', ' ')} {_value(name, value)}"
        for name, value in case.items()
        if name not in _SHOWN_ELSEWHERE and isinstance(value, (int, float, str))
    ]
    return _cell(", ".join(parts))


def _value(name: str, value: float | str) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if name.endswith("share") or name == "spread":
        return f"{value:.2%}"
    if name == "rate":
        return f"{value / 1e12:,.3f} T/s"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _time(seconds: float | None) -> str:
    if not seconds:
        return ""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _failures(report: dict[str, Any]) -> list[str]:
    lines = ["", "## Failures", ""]
    for name, entry in report["sections"].items():
        if entry["status"] not in ("ok", "running"):
            lines += [f"### {name}: {entry['status']}", ""]
            if entry.get("log"):
                lines += ["```", entry["log"].replace("```", "'''"), "```", ""]
        for case, text in entry.get("errors", {}).items():
            lines += [f"### {name}, {case}", "", "```", text.replace("```", "'''"), "```", ""]
    if len(lines) == 3:
        lines.append("None.")
    return lines
