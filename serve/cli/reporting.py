"""What every command of the `serve` command line says about itself: logs and errors."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from serve.errors import ConfigError, MergestepError, RequestError, message_of

errors = Console(stderr=True)


def warn(message: str) -> None:
    _say("[yellow]warning[/yellow]", message)


def shown(text: str) -> str:
    """Without what a terminal obeys: names and messages come from files and servers, too."""
    return "".join(char if char.isprintable() or char in "\n\t" else "?" for char in text)


def _say(kind: str, message: str) -> None:
    errors.print(f"{kind}: ", end="")
    errors.print(shown(message), markup=False, highlight=False, soft_wrap=True)


def set_up_logging(level: str) -> None:
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise typer.BadParameter(f"no log level is called {level!r}", param_hint="--log-level")
    logging.basicConfig(
        level=number, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", force=True
    )


@contextmanager
def reported() -> Iterator[None]:
    """Errors that the user can mend are one line, not a traceback. Exit code 2: what was asked
    for cannot be; 1: it failed on the way."""
    try:
        yield
    except BrokenPipeError:  # of `| head`: typer leaves silently
        raise
    except (MergestepError, OSError) as exc:
        _say("[red]error[/red]", message_of(exc))
        raise typer.Exit(2 if isinstance(exc, ConfigError | RequestError) else 1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
