"""Memory that the ranks of one host share, and a barrier over it.

The arena is a sealed memfd: a control page, and data that every rank maps. It holds no lock, so
that a rank may die at any point: the others then wait until a deadline, or until a process aborts.
An aborted arena is of use again after `reset`, which begins a new generation; each rank joins that
and counts its barriers from zero. A process that resets makes sure that no process of the old
generation still writes: it has ended, or has been told the new generation.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

from transport import _windows

NO_RANK = -1
"""The rank of a process that takes no part in barriers, and may abort and reset."""
_ABORTED = -1
_ALIGNMENT = mmap.PAGESIZE


class ExchangeError(OSError):
    """The ranks of a group could not exchange their results."""


class RankMissing(ExchangeError):
    """Ranks did not arrive in time. ranks are those, rank is the first, waited_s is how long the
    others waited."""

    def __init__(self, ranks: tuple[int, ...], waited_s: float, reason: str = "") -> None:
        self.ranks, self.rank, self.waited_s = ranks, ranks[0], waited_s
        names = f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {list(ranks)} are"
        super().__init__(f"{names} missing after {waited_s:.3f} s{reason and ': ' + reason}")


class Aborted(ExchangeError):
    """A process has ended the generation, or this rank does not belong to it."""


class ArenaMismatch(ExchangeError):
    """A file is no arena, or one of another version or size."""


class Arena:
    """One process's mapping of an arena. One thread at a time uses barrier and join; any thread may
    abort."""

    def __init__(self, fd: int, rank: int) -> None:
        """Takes over fd. Raises ArenaMismatch."""
        try:
            self._native = _windows.Arena(fd, rank)
            self._data = mmap.mmap(fd, self._native.num_bytes, offset=_windows.ARENA_DATA_AT)
        except ValueError as error:
            os.close(fd)
            raise ArenaMismatch(str(error)) from error
        except BaseException:
            os.close(fd)
            raise
        self.rank = rank
        self._fd: int | None = fd
        self.generation = self._native.generation
        self._native.join(self.generation)

    @classmethod
    def create(cls, num_bytes: int, num_ranks: int, rank: int = NO_RANK) -> Arena:
        """Makes an arena with num_bytes of data, rounded up to pages; Linux takes memory for the
        parts that are touched. Raises ArenaMismatch and OSError."""
        rounded = max(1, -(-num_bytes // _ALIGNMENT)) * _ALIGNMENT
        try:
            fd = _windows.create_arena_fd(rounded, num_ranks)
        except ValueError as error:
            raise ArenaMismatch(str(error)) from error
        return cls(fd, rank)

    @classmethod
    def open(cls, where: int | str | Path, rank: int) -> Arena:
        """Maps the arena of a file descriptor, which stays open, or of a path (see `path`). Raises
        ArenaMismatch and OSError."""
        if isinstance(where, int):
            return cls(os.dup(where), rank)
        return cls(os.open(where, os.O_RDWR | os.O_CLOEXEC), rank)

    @property
    def num_bytes(self) -> int:
        return self._native.num_bytes

    @property
    def num_ranks(self) -> int:
        return self._native.num_ranks

    @property
    def data(self) -> mmap.mmap:
        """The shared bytes, for torch.frombuffer; the mapping lives as long as a tensor of it."""
        return self._data

    @property
    def fd(self) -> int:
        if self._fd is None:
            raise ExchangeError("the arena is closed")
        return self._fd

    @property
    def path(self) -> str:
        """Where other processes of this user can open it, as long as this object is not closed."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    @property
    def spin_s(self) -> float:
        """The time that a barrier spins before it sleeps. It yields its core to other threads."""
        return self._native.spin_s

    @spin_s.setter
    def spin_s(self, spin_s: float) -> None:
        self._native.spin_s = spin_s

    @property
    def waited_s(self) -> float:
        """The seconds that this rank has spent in barriers."""
        return self._native.waited_s

    @property
    def num_barriers(self) -> int:
        """The number of barriers that this rank has passed."""
        return self._native.num_barriers

    @property
    def is_aborted(self) -> bool:
        return self._native.is_aborted

    @property
    def is_over(self) -> bool:
        """Whether the generation that this process knows is aborted or followed by another."""
        return self._native.is_aborted or self._native.generation != self.generation

    def barrier(self, deadline_s: float) -> None:
        """Returns when all ranks have arrived; what they wrote before is then visible.

        Raises RankMissing after deadline_s, and Aborted. After either this rank must join a new
        generation.
        """
        missing = self._native.barrier(deadline_s)
        if missing == 0:
            return
        if missing == _ABORTED:
            raise Aborted(self._why_not())
        ranks = tuple(rank for rank in range(self.num_ranks) if missing >> rank & 1)
        raise RankMissing(ranks, deadline_s)

    def abort(self) -> None:
        """Ends the generation that this process knows: every barrier of it returns with Aborted at
        once. A later one is left alone."""
        self._native.abort(self.generation)

    def reset(self, generation: int) -> None:
        """Begins a generation, of a number that has not been used before. Ranks then join it."""
        if generation == self._native.generation:
            raise ValueError(f"generation {generation} is not new")
        self._native.reset(generation)
        self.generation = generation

    def join(self, generation: int) -> None:
        """Takes part in a generation, from its first barrier on. Raises Aborted if it is not the
        arena's, or this rank was in barriers of it before."""
        self.generation = generation
        if not self._native.join(generation):
            raise Aborted(self._why_not())

    def close(self) -> None:
        """Closes the file. The data is unmapped when no tensor of it is left."""
        if self._fd is None:
            return
        os.close(self._fd)
        self._fd = None
        with contextlib.suppress(BufferError):
            self._data.close()

    def _why_not(self) -> str:
        if self._native.generation != self.generation:
            return f"generation {self.generation} is over; it is {self._native.generation} now"
        if self.is_aborted:
            return f"generation {self.generation} is aborted"
        if self.rank == NO_RANK:
            return "this process has no rank"
        return f"rank {self.rank} has left generation {self.generation}, or has a successor in it"
