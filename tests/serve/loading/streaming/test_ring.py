"""The ring reads the next units as soon as it has room, in the order of their use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from memory.tiers.block_file import Transfer, os_error
from ops.cpu import native_library
from serve.errors import WeightsLostError
from serve.loading.streaming.reader import MAX_TRIES, WeightReader
from serve.loading.streaming.ring import Ring
from serve.loading.streaming.units import PIECE_BYTES, Piece, Unit, unit_of
from serve.models.packed_cache.layout import Span
from tests.support.models.streamed import FaultyFile

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="needs the native kernels"
)
PAGE = 4096


class HeldFile:
    """A BlockFile that delivers when it is told to, and notes what was asked for."""

    io, is_direct = "held", True

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.waiting: list[Transfer] = []
        self.is_held = False
        self.error: OSError | None = None  # of reads that are not held

    def read(self, transfers: Sequence[Transfer]) -> None:
        self.asked += [transfer.offset // PAGE for transfer in transfers]
        self.waiting += transfers
        if not self.is_held:
            self.deliver(self.error)

    def deliver(self, error: OSError | None = None) -> None:
        waiting, self.waiting = self.waiting, []
        for transfer in waiting:
            transfer.done(error)

    def close(self, timeout_s: float | None = None) -> bool:
        return True

    write = register = fileno = preallocate = flush = FaultyFile.flush


def make(units: int, buffers: int) -> tuple[Ring, HeldFile]:
    memory = torch.zeros((buffers + 1) * PAGE, dtype=torch.uint8)
    base = -(-memory.data_ptr() // PAGE) * PAGE
    checksum = native_library.library().checksum(base, PAGE)
    file = HeldFile()
    checksums = {(number * PAGE, PAGE): checksum for number in range(units)}
    reader = WeightReader(Path("weights"), file, checksums)  # type: ignore[arg-type]
    all_units = [Unit(f"unit {n}", (Piece(n * PAGE, PAGE, 0),), PAGE) for n in range(units)]
    ring = Ring(reader, all_units, [base + n * PAGE for n in range(buffers)])
    ring.memory = memory  # type: ignore[attr-defined]
    return ring, file


def step(ring: Ring, units: Sequence[int]) -> None:
    for number in units:
        with ring.using(number):
            buffers = len(ring._buffers)
            assert ring._content[number % buffers] == number, "another unit is in the buffer"


@pytest.mark.parametrize(("units", "buffers"), [(5, 2), (6, 3), (7, 3), (8, 3), (3, 3), (9, 4)])
def test_each_unit_is_read_once_a_step_in_order(units: int, buffers: int) -> None:
    ring, file = make(units, buffers)
    ring.start()
    assert file.asked == list(range(buffers))
    for _ in range(4):
        file.asked.clear()
        step(ring, range(units))
        if units > buffers:
            assert sorted(file.asked) == list(range(units))
            ahead = [*range(buffers, units)]
            assert [n for n in file.asked if n >= buffers] == ahead
        else:
            assert not file.asked, "what fits stays"


def test_a_unit_is_read_while_the_one_before_is_used() -> None:
    ring, file = make(6, 3)
    ring.start()
    file.asked.clear()
    with ring.using(0):
        assert not file.asked
    assert file.asked == [3]
    with ring.using(1):
        assert file.asked == [3]
    assert file.asked == [3, 4]


def test_a_step_that_ends_early_or_leaves_units_out_changes_nothing() -> None:
    ring, file = make(6, 2)
    ring.start()
    for units in ([0, 1, 2], [0, 1, 2, 3, 4, 5], [5], [0, 2, 4], [0, 1, 2, 3], range(6)):
        step(ring, units)
    file.asked.clear()
    step(ring, range(6))
    assert sorted(file.asked) == list(range(6))


def test_two_passes_side_by_side_read_each_unit_once() -> None:
    ring, file = make(6, 3)
    ring.start()
    step(ring, range(6))
    file.asked.clear()
    ring.enter(0)
    ring.enter(0)
    for number in range(1, 6):  # each pass goes on in turn
        for _ in range(2):
            ring.leave(number - 1)
            ring.enter(number)
    ring.leave(5)
    ring.leave(5)
    assert sorted(file.asked) == list(range(6))


def test_an_error_is_one_of_the_unit_and_it_is_read_again() -> None:
    ring, file = make(4, 2)
    file.error = os_error(5)
    ring.start()
    assert file.asked == [0] * MAX_TRIES + [1] * MAX_TRIES
    for unit in (0, 1):  # each is tried again when it is needed
        with pytest.raises(WeightsLostError, match=f"of unit {unit} cannot be read from weights: "):
            ring.enter(unit)
    assert file.asked[2 * MAX_TRIES :] == [0] * MAX_TRIES + [1] * MAX_TRIES
    file.error = None
    step(ring, range(4))


def test_a_failed_read_ahead_is_no_error_if_the_disk_is_well_again() -> None:
    ring, file = make(4, 2)
    file.error = os_error(5)
    ring.start()
    file.error = None
    assert not ring.has_come(0)
    step(ring, range(4))


def test_a_read_that_does_not_begin_is_not_taken_for_one_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ring, file = make(4, 2)
    ring.start()
    step(ring, [0, 1])
    with monkeypatch.context() as patch:
        patch.setattr(file, "read", _fail)
        with pytest.raises(MemoryError):
            step(ring, [2])  # unit 0 of the next step would be read now
    file.asked.clear()
    step(ring, [0])
    assert file.asked == [0, 2]


def _fail(*_: object) -> None:
    raise MemoryError


def test_pieces_cover_what_a_unit_needs() -> None:
    spans = [Span(PIECE_BYTES + 64, 5 << 20), Span(100 << 20, 128), Span((7 << 20) + 4096, 4096)]
    unit = unit_of("a unit", spans)
    assert all(piece.start % PAGE == piece.num_bytes % PAGE == 0 for piece in unit.pieces)
    assert all(
        piece.start // PIECE_BYTES == (piece.start + piece.num_bytes - 1) // PIECE_BYTES
        for piece in unit.pieces
    )
    ends = [piece.at + piece.num_bytes for piece in unit.pieces]
    assert [piece.at for piece in unit.pieces] == [0, *ends[:-1]] and ends[-1] == unit.num_bytes
    for span in spans:
        at = unit.offset_of(span.start)
        assert unit.offset_of(span.start + span.num_bytes - 1) == at + span.num_bytes - 1
        assert at % 64 == span.start % 64
