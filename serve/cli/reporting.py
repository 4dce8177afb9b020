"""Logging and error messages of all commands."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from serve.errors import ConfigError, MergestepError, RequestError, message_of

errors = Console(stderr=True)


def warn(message: str) -> None:
    _print("[yellow]warning[/yellow]", message)


def note(message: str) -> None:
    """Tells on stderr what is being done."""
    errors.print(printable(message), markup=False, highlight=False, soft_wrap=True)


def printable(text: str) -> str:
    """Replaces control characters, since names and messages may come from files and servers."""
    return "".join(char if char.isprintable() or char in "\n\t" else "?" for char in text)


def _print(kind: str, message: str) -> None:
    errors.print(f"{kind}: ", end="")
    errors.print(printable(message), markup=False, highlight=False, soft_wrap=True)


def set_up_logging(level: str) -> None:
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise typer.BadParameter(f"{level!r} is not a log level", param_hint="--log-level")
    logging.basicConfig(
        level=number, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", force=True
    )


@contextmanager
def reported() -> Iterator[None]:
    """Prints errors that the user can fix as one line and exits with code 2 for a wrong option,
    setting or request, and with code 1 for a failure."""
    try:
        yield
    except BrokenPipeError:  # for example from `| head`; typer exits silently
        raise
    except (MergestepError, OSError) as exc:
        _print("[red]error[/red]", message_of(exc))
        raise typer.Exit(2 if isinstance(exc, ConfigError | RequestError) else 1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
