"""Follows the loading of weights, layer by layer."""

from __future__ import annotations

import collections.abc as abc
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from serve.models.spec import ModelSpec

_BAR_CHARS = 40


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """is_shown: draws a bar on a terminal. check: is called before each layer; finish: after the
    last one, before memory for K/V is taken. Both may raise to end the loading.

    The bar is plain text that leaves the cursor visible: a signal may end the process at any time.
    """

    is_shown: bool = False
    check: Callable[[], object] = object
    finish: Callable[[], object] = object

    def layers(self, spec: ModelSpec, numbers: abc.Sequence[int]) -> Iterator[int]:
        """Yields the numbers of layers while they are loaded."""
        is_drawn = (
            self.is_shown and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        )
        try:
            for index, number in enumerate(numbers):
                self.check()
                if is_drawn:
                    done = _BAR_CHARS * index // len(numbers)
                    bar = "#" * done + "." * (_BAR_CHARS - done)
                    _write(f"\rloading {spec.model_type} [{bar}] {index}/{len(numbers)} layers")
                yield number
            self.finish()
        finally:
            if is_drawn:
                _write("\r\x1b[K")


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
