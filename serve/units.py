"""Sizes and counts as text for users."""

from __future__ import annotations


def format_size(num_bytes: int) -> str:
    """Formats a size exactly, as parse_size reads it: 65536 -> "64KiB", 1000 -> "1000"."""
    for unit, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if num_bytes and num_bytes % 1024**power == 0:
            return f"{num_bytes // 1024**power}{unit}"
    return str(num_bytes)


def format_count(count: float) -> str:
    """Formats a count with three digits: 1320000 -> "1.32 M"."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:g}"


def format_parameters(total: int, active: int) -> str:
    """Formats numbers of parameters; active: those that a token uses, named if they differ."""
    text = format_count(total)
    return text if active == total else f"{text}, {format_count(active)} active"


def format_memory(num_bytes: float) -> str:
    """Formats a size with three digits: 1300000000 -> "1.21 GiB"."""
    for unit, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if num_bytes >= 1024**power:
            return f"{_three_digits(num_bytes / 1024**power)} {unit}"
    return f"{num_bytes:g} bytes"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
