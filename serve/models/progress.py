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
    """is_shown: draws a bar on a terminal. check: is called before each layer; poll: now and then
    while weights come from elsewhere; finish: after the last layer, before memory for K/V is taken.
    All may raise to end the loading.

    The bar is plain text that leaves the cursor visible: a signal may end the process at any time.
    """

    is_shown: bool = False
    check: Callable[[], object] = object
    finish: Callable[[], object] = object
    poll: Callable[[], object] = object

    def layers(self, spec: ModelSpec, numbers: abc.Sequence[int]) -> Iterator[int]:
        """Yields the numbers of layers while they are loaded."""
        is_drawn = self._is_drawn()
        try:
            for index, number in enumerate(numbers):
                self.check()
                if is_drawn:
                    bar = _bar(index / len(numbers))
                    _write(f"\rloading {spec.model_type} [{bar}] {index}/{len(numbers)} layers")
                yield number
            self.finish()
        finally:
            if is_drawn:
                _write("\r\x1b[K")

    def show_bytes(self, done: int, whole: int) -> None:
        """Draws how much of the weights has come."""
        if self._is_drawn():
            _write(f"\rpulling weights [{_bar(done / whole)}] {done >> 20}/{whole >> 20} MiB")

    def end_bytes(self) -> None:
        """Removes what show_bytes has drawn."""
        if self._is_drawn():
            _write("\r\x1b[K")

    def _is_drawn(self) -> bool:
        return self.is_shown and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _bar(share: float) -> str:
    done = int(_BAR_CHARS * share)
    return "#" * done + "." * (_BAR_CHARS - done)


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
