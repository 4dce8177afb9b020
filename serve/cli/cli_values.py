"""How values are written on the command line, in the environment and in a configuration file."""

from __future__ import annotations

import re

import typer

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str | int) -> int:
    """ "2GiB", "512M", "1e3"-free plain bytes. K, M, G and T are powers of 1024 here."""
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise typer.BadParameter(f"{str(text)[:40]!r} is not a size such as 512M or 2GiB")
    return int(float(match[1]) * 1024 ** _POWERS[match[2].upper()])


def split_list(text: str) -> tuple[str, ...]:
    """ "a, b" -> ("a", "b")."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
