"""A measurement in a few words."""

from __future__ import annotations

import math

from bench.load.client.redact import redact
from bench.load.report.terminal import number
from bench.load.results.document import Measurement

MAX_TOLD = 0.01


def verdict(made: Measurement) -> tuple[str, str]:
    """("valid" | "warned" | "invalid", words for a person)."""
    bad = sum(not rate.is_valid for rate in made.rates)
    failed = failures(made)
    if not made.is_valid:
        words = f"INVALID: {bad} of {len(made.rates)} rates must not be used"
        return "invalid", f"{words}; {failed}" if failed else words
    if failed:
        return "warned", f"Valid, but {failed}"
    if any(run.verdict.warnings for rate in made.rates for run in rate.runs):
        return "warned", "Valid, with warnings"
    return "valid", "Valid: the load was offered as planned"


def failures(made: Measurement) -> str:
    """How many requests failed, where more than MAX_TOLD of a rate did; else empty."""
    if not any(rate.failed_share.value > MAX_TOLD for rate in made.rates):
        return ""
    verdicts = [run.verdict for rate in made.rates for run in rate.runs]
    lost, asked = sum(v.num_lost for v in verdicts), sum(v.num_asked for v in verdicts)
    return f"{lost:,} of {asked:,} requests failed"


def headline(made: Measurement) -> str:
    target = redact(made.rates[0].runs[0].target) if made.rates else "nothing"
    rates = [rate.qps for rate in made.rates]
    offered = ", ".join("all at once" if math.isinf(qps) else f"{number(qps)}/s" for qps in rates)
    if len(rates) > 4:
        offered = f"{len(rates)} rates from {number(rates[0])} to {number(rates[-1])}/s"
    return f"{target} · {offered} · {made.machine['cpu']} · {made.created}"
