"""The weights of a rank that others have started, which outlive the engine they were loaded for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from serve.config import EngineConfig
from serve.group.grid import Grid
from serve.group.rank import Rank

logger = logging.getLogger(__name__)

_Files = tuple[tuple[str, int, int], ...]


class KeptRank:
    """Holds the last loaded rank, for an engine that asks for the same one."""

    def __init__(self) -> None:
        self._rank: Rank | None = None
        self._of: tuple[EngineConfig, Grid, int, _Files] | None = None

    def get(self, config: EngineConfig, grid: Grid, number: int, load: Callable[[], Rank]) -> Rank:
        """Returns the rank that is held if it has the same settings and place, and the same files;
        otherwise frees it and returns what `load` does."""
        asked = (config, grid, number, _files(config.model_path))
        if self._rank is not None and self._of == asked:
            logger.info("rank %d still has its weights", number)
            return self._rank
        self._rank = self._of = None  # there may be no room for both
        self._rank = load()
        self._of = asked
        return self._rank


def _files(folder: Path) -> _Files:
    """Returns the name, size and time of change of each file of a model. OSError if there is no
    folder."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_file():
            status = path.stat()
            found.append((path.name, status.st_size, status.st_mtime_ns))
    return tuple(found)
