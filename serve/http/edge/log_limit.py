"""What strangers can cause is told, but not as often as they cause it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

INTERVAL_S = 10.0
MAX_TEXTS = 64


class LimitedLog:
    """A warning of each text in INTERVAL_S; the next one says how many were left out."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._told: dict[str, tuple[float, int]] = {}

    def warning(self, text: str, *values: object) -> None:
        """text: a constant, with places for the values."""
        now_s = self._clock()
        told = self._told.get(text)
        if told is not None and now_s - told[0] < INTERVAL_S:
            self._told[text] = told[0], told[1] + 1
            return
        left_out = told[1] if told is not None else 0
        if len(self._told) >= MAX_TEXTS:
            self._told.clear()
        self._told[text] = now_s, 0
        if left_out:
            self._logger.warning(f"{text} (and %d more times)", *values, left_out)
        else:
            self._logger.warning(text, *values)
