"""The names of pages of an engine's sequences, for its peers: those that are computed, which a peer
copies in case this engine dies, and those that will be, for which a peer waits.

The compute thread says which sequences are queued, how far they are computed and when they end.
Followers are peers that copy pages of running sequences. Each sequence has at most one, that which
has the fewest; if a follower leaves, another one gets its sequences from their beginning. Names are
told once and only on request, so a follower that asks for none costs nothing. One that does not ask
for FOLLOWER_S loses its sequences and gets no others until it asks; then it is told which ones it
has lost, since it keeps their copies until it knows. Integers and bytes only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

FOLLOWER_S = 2.0
MIN_AGE_S = 1.0
"""Seconds. A sequence that ends sooner after its first page is not copied."""
ENDED = bytes(16)
"""In place of a name: the sequence has ended, or another follower has it."""


class Copied(NamedTuple):
    """Where a sequence's pages are copied: by the engine with this id, which was told the names of
    the pages of this many tokens, from the first one on."""

    engine: str
    num_tokens: int


@dataclass(slots=True)
class _Pages:
    """The pages of a sequence. names: grows in the compute thread. owner: what `copied` is asked
    about."""

    number: int
    owner: Hashable
    names: Sequence[bytes]
    num_expected: int  # names when it was queued
    num_computed: int = 0
    since_s: float = 0.0  # when its first page was computed
    follower: Hashable | None = None
    num_told: int = 0  # to its follower


@dataclass(slots=True)
class _Follower:
    engine: str  # its id
    asked_s: float
    num_sequences: int = 0
    ended: list[int] = field(default_factory=list)  # numbers that it is still to be told


class SequenceNames:
    """All methods take a lock for a moment; those of the compute thread come first."""

    def __init__(
        self,
        page_end: Callable[[int], int],
        *,
        min_age_s: float = MIN_AGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """page_end(i): the tokens that must be computed for page i to be complete."""
        self._page_end = page_end
        self._min_age_s = min_age_s
        self._clock = clock
        self._lock = threading.Lock()
        self._sequences: dict[Hashable, _Pages] = {}
        self._running: dict[int, _Pages] = {}  # those that have a page
        self._of_owner: dict[Hashable, _Pages] = {}
        self._expected: dict[bytes, int] = {}  # of how many sequences
        self._followers: dict[Hashable, _Follower] = {}
        self._next_number = 0

    # ---- the compute thread

    def queued(
        self, sequence: Hashable, names: Sequence[bytes], owner: Hashable | None = None
    ) -> None:
        """Takes note of a new sequence, whose prompt fills the pages with these names. names: gets
        those of further pages as they are computed. owner: of several sequences perhaps; None: it
        is the sequence itself."""
        with self._lock:
            owner = sequence if owner is None else owner
            pages = _Pages(self._next_number, owner, names, len(names))
            self._of_owner[owner] = pages
            self._next_number = (self._next_number + 1) & 0xFFFFFFFF
            self._sequences[sequence] = pages
            for name in names:
                self._expected[name] = self._expected.get(name, 0) + 1

    def computed(self, sequence: Hashable, num_tokens: int) -> None:
        """Takes note that the first num_tokens tokens are computed and their pages cached."""
        pages = self._sequences.get(sequence)
        if pages is None:
            return
        end, most = pages.num_computed, len(pages.names)
        while end < most and self._page_end(end) <= num_tokens:
            end += 1
        with self._lock:
            if not pages.num_computed and end:
                pages.since_s = self._clock()
                self._running[pages.number] = pages
            self._expect_no_more(pages, end)
            pages.num_computed = end

    def ended(self, sequence: Hashable) -> None:
        with self._lock:
            pages = self._sequences.pop(sequence, None)
            if pages is None:
                return
            self._expect_no_more(pages, pages.num_expected)
            self._running.pop(pages.number, None)
            if self._of_owner.get(pages.owner) is pages:
                del self._of_owner[pages.owner]
            self._take_from_follower(pages)

    def _expect_no_more(self, pages: _Pages, end: int) -> None:
        """Removes what is computed before `end`, or ended, from what is expected."""
        for name in pages.names[pages.num_computed : min(end, pages.num_expected)]:
            left = self._expected.pop(name) - 1
            if left:
                self._expected[name] = left

    # ---- any thread

    def is_expected(self, name: bytes) -> bool:
        """Returns whether a sequence waits for the page to be computed, or computes it."""
        return name in self._expected

    def copied(self, owner: Hashable) -> Copied | None:
        """Returns where the pages of the owner's sequence, the last one of several, are copied."""
        with self._lock:
            pages = self._of_owner.get(owner)
            known = None if pages is None else self._followers.get(pages.follower)
            if pages is None or known is None or not pages.num_told:
                return None
            return Copied(known.engine, self._page_end(pages.num_told - 1))

    @property
    def num_followers(self) -> int:
        return len(self._followers)

    def news(self, follower: Hashable, most: int, engine: str = "") -> list[tuple[int, bytes]]:
        """Returns at most so many pages that the follower was not told of, as the number of their
        sequence and their name, parents first; ENDED for sequences that have ended. engine: the
        follower's id."""
        now_s = self._clock()
        with self._lock:
            known = self._followers.setdefault(follower, _Follower(engine, now_s))
            known.asked_s = now_s
            late = [it for it, state in self._followers.items() if _is_late(state, now_s)]
            for one in late:
                self._take_all_from(one)
            self._share_out(now_s)
            found = [(number, ENDED) for number in known.ended[:most]]
            del known.ended[:most]
            for pages in self._running.values() if known.num_sequences else ():
                if len(found) >= most:
                    break
                if pages.num_told < pages.num_computed and pages.follower == follower:
                    end = min(pages.num_computed, pages.num_told + most - len(found))
                    names = pages.names[pages.num_told : end]
                    found += [(pages.number, name) for name in names]
                    pages.num_told = end
            return found

    def leave(self, follower: Hashable) -> None:
        """Forgets a follower; the others get its sequences."""
        with self._lock:
            if follower in self._followers:
                self._take_all_from(follower)
                self._followers.pop(follower, None)

    def _take_all_from(self, follower: Hashable) -> None:
        """Takes its sequences from a follower. One that has nothing to be told is forgotten."""
        known = self._followers[follower]
        if known.num_sequences:
            for pages in self._running.values():
                if pages.follower == follower:
                    self._take_from_follower(pages)
                    pages.follower, pages.num_told = None, 0
        if not known.ended:
            del self._followers[follower]

    def _share_out(self, now_s: float) -> None:
        """Gives each sequence that has run for a while a follower, one that is not late."""
        states = {one: it for one, it in self._followers.items() if not _is_late(it, now_s)}
        for pages in self._running.values():
            if pages.follower is None and now_s - pages.since_s >= self._min_age_s:
                pages.follower = min(states, key=lambda one: states[one].num_sequences)
                states[pages.follower].num_sequences += 1

    def _take_from_follower(self, pages: _Pages) -> None:
        known = None if pages.follower is None else self._followers.get(pages.follower)
        if known is not None:
            known.num_sequences -= 1
            if pages.num_told:
                known.ended.append(pages.number)


def _is_late(state: _Follower, now_s: float) -> bool:
    return now_s - state.asked_s > FOLLOWER_S
