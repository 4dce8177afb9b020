"""The command line of measurements on a simulated clock: tables, and a last line of JSON."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

Rows = Mapping[str, Any]


def run(
    description: str | None,
    measure: Callable[[bool], Mapping[str, Rows]],
    show: Callable[[str, Any], None],
) -> None:
    """Runs measure(is_quick), which returns {case: {row: a dataclass of figures}}, and prints each
    case with show(case, rows)."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short traces, for tests")
    args = parser.parse_args()
    machine = platform.processor() or platform.machine()
    print(f"machine: {machine}, Python {platform.python_version()}; step times are simulated")
    found = measure(args.quick)
    for name, rows in found.items():
        show(name, rows)
    print(
        json.dumps(
            {
                name: {row: asdict(figures) for row, figures in rows.items()}
                for name, rows in found.items()
            }
        )
    )
