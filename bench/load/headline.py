"""A measurement in a few words."""

from __future__ import annotations

import math

from bench.load.document import Measurement
from bench.load.redact import redact
from bench.load.terminal import number


def verdict(made: Measurement) -> tuple[str, str]:
    """("valid" | "warned" | "invalid", words for a person)."""
    bad = sum(not rate.is_valid for rate in made.rates)
    if bad or not made.rates:
        return "invalid", f"INVALID: {bad} of {len(made.rates)} rates must not be used"
    if any(run.verdict.warnings for rate in made.rates for run in rate.runs):
        return "warned", "Valid, with warnings"
    return "valid", "Valid: the load was offered as planned"


def headline(made: Measurement) -> str:
    target = redact(made.rates[0].runs[0].target) if made.rates else "nothing"
    rates = [rate.qps for rate in made.rates]
    offered = ", ".join("all at once" if math.isinf(qps) else f"{number(qps)}/s" for qps in rates)
    if len(rates) > 4:
        offered = f"{len(rates)} rates from {number(rates[0])} to {number(rates[-1])}/s"
    return f"{target} · {offered} · {made.machine['cpu']} · {made.created}"
