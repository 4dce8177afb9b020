"""How values are written on the command line, in the environment and in a configuration file."""

from __future__ import annotations

import re

import typer

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str | int) -> int:
    """ "2GiB", "512M", "1e3"-free plain bytes. K, M, G and T are powers of 1024 here."""
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size such as 512M or 2GiB")
    return int(float(match[1]) * 1024 ** _POWERS[match[2].upper()])


def format_size(num_bytes: int) -> str:
    """As parse_size reads it, without a loss: 65536 -> "64KiB", 1000 -> "1000"."""
    for unit, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if num_bytes and num_bytes % 1024**power == 0:
            return f"{num_bytes // 1024**power}{unit}"
    return str(num_bytes)


def split_list(text: str) -> tuple[str, ...]:
    """ "a, b" -> ("a", "b")."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
