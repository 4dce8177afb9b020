"""Reads units of weights from their file, asynchronously, and compares them with checksums.

A piece that cannot be read, or that is not what it was at the start, is read again; then the fetch
fails with WeightsLostError. The file stays open, so that replacing it changes nothing; one that is
cut off or written to is noticed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from memory.tiers.block_file import BlockFile, Transfer
from ops.cpu import native_library
from serve.errors import WeightsLostError, reason
from serve.loading.streaming.units import Piece, Unit

logger = logging.getLogger(__name__)

MAX_TRIES = 3  # of one piece


@dataclass(slots=True)
class ReadStats:
    """What was read since the start. stalled_s: seconds that computing waited for weights.
    repeated: pieces that were read again; failed: those that could not be read at all."""

    num_bytes: int = 0
    stalled_s: float = 0.0
    repeated: int = 0
    failed: int = 0


class Fetch:
    """A unit on its way into memory."""

    def __init__(self, name: str, num_pieces: int) -> None:
        self.name = name
        self.error: WeightsLostError | None = None
        self._left = num_pieces
        self._done = threading.Event()
        if not num_pieces:
            self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        """Waits for all pieces. WeightsLostError if one did not come."""
        self.join()
        if self.error is not None:
            raise WeightsLostError(str(self.error))

    def join(self) -> None:
        """Waits until nothing is written to the memory any more."""
        self._done.wait()

    def end_piece(self, error: WeightsLostError | None) -> None:
        """Only the file's threads call it, under the reader's lock."""
        self.error = self.error or error
        self._left -= 1
        if not self._left:
            self._done.set()


class WeightReader:
    """Fetches units of one file."""

    def __init__(
        self, path: Path, file: BlockFile, checksums: Mapping[tuple[int, int], int]
    ) -> None:
        """Owns the file from now on. checksums: of pieces, by their start and bytes."""
        self._path, self._file, self._checksums = path, file, checksums
        self._lock = threading.Lock()
        self.stats = ReadStats()

    def fetch(self, unit: Unit, address: int) -> Fetch:
        """Starts to read a unit to `address`, which belongs to the fetch until it is done."""
        return self.fetch_pieces(unit.name, unit.pieces, address)

    def fetch_pieces(self, name: str, pieces: tuple[Piece, ...], address: int) -> Fetch:
        fetch = Fetch(name, len(pieces))
        self._file.read([self._transfer(fetch, piece, address, 1) for piece in pieces])
        return fetch

    def wait(self, fetch: Fetch) -> None:
        """Waits for a fetch, and counts the wait. WeightsLostError."""
        if fetch.is_done and fetch.error is None:
            return
        began = time.monotonic()
        try:
            fetch.wait()
        finally:
            self.stats.stalled_s += time.monotonic() - began

    def register(self, regions: list[tuple[int, int]]) -> None:
        """Pins memory so that reads into it are cheaper, if the system allows it."""
        self._file.register(regions)

    def close(self) -> None:
        self._file.close()

    def _transfer(self, fetch: Fetch, piece: Piece, address: int, tries: int) -> Transfer:
        def done(error: OSError | None) -> None:
            self._end(fetch, piece, address, tries, error)

        return Transfer(address + piece.at, piece.num_bytes, piece.start, done)

    def _end(
        self, fetch: Fetch, piece: Piece, address: int, tries: int, error: OSError | None
    ) -> None:
        """Runs in a thread of the file when a piece has come, or has not."""
        why = None if error is None else reason(error)
        if error is None:
            found = native_library.library().checksum(address + piece.at, piece.num_bytes)
            if found != self._checksums[piece.start, piece.num_bytes]:
                why = "its bytes have changed"
        if why is None:
            with self._lock:
                self.stats.num_bytes += piece.num_bytes
                fetch.end_piece(None)
            return
        if tries < MAX_TRIES:
            with self._lock:
                self.stats.repeated += 1
            self._file.read([self._transfer(fetch, piece, address, tries + 1)])
            return
        text = f"the weights of {fetch.name} cannot be read from {self._path}: {why}"
        logger.error("%s (bytes from %d on)", text, piece.start)
        with self._lock:
            self.stats.failed += 1
            fetch.end_piece(WeightsLostError(text))
