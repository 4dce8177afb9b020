"""Slots of memory for the experts of all mixtures, of which not all fit.

One native operator covers all slots; a row's experts are translated to the slots where they are, so
that the kernel computes what it would over experts that were all resident, with the same bits.
While some experts of a step are read, those that are there are computed, and the others as they
come. The experts that were used most often stay: a step goes through the layers in turn, so that
the expert that was used least recently is the one that is needed next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ops.backend import ExpertsOp, Router, Routing
from serve.loading.streaming.expert_sums import PairSums, bytes_of_pairs
from serve.loading.streaming.reader import Fetch, WeightReader
from serve.loading.streaming.units import Unit

DECAY = 0.95  # of how often an expert was used, per step
LEAST_PRECISION = 0.8  # a wrong guess costs a read, a right one saves the wait for it
_LEARNING = 0.01
_MAX_GUESS_ROWS = 16  # of more rows, a step uses most experts anyway
MAX_SUM_BYTES = 32 << 20  # of experts' results; with more rows, computing outlasts reading anyway
Ints = np.ndarray


@dataclass(slots=True)
class ExpertStats:
    """How the experts that steps used were found, each once a step. hits: in memory; late: on their
    way, since they were guessed; misses: on the disk. guesses: experts that were read ahead;
    used_guesses: those of them that were used."""

    hits: int = 0
    late: int = 0
    misses: int = 0
    guesses: int = 0
    used_guesses: int = 0


class ExpertSlots:
    """The slots of mixtures of one form. Only the thread that computes calls it."""

    def __init__(
        self,
        units: Sequence[Sequence[Unit]],
        addresses: Sequence[int],
        op: ExpertsOp,
        *,
        num_out: int,
        scales_input: bool,
    ) -> None:
        """units: of each mixture's experts. addresses: of the slots. op: over all slots, with
        num_out outputs. Its reader is set before it computes."""
        self._units, self._addresses, self._op = units, addresses, op
        self._num_out, self._scales_input = num_out, scales_input
        self.reader: WeightReader | None = None
        width = max(map(len, units))
        self._slot_of = np.full((len(units), width), -1, np.int32)
        self._owner = np.full((len(addresses), 2), -1, np.int32)
        self._heat = np.zeros((len(units), width), np.float64)
        self._fetches: dict[int, Fetch] = {}
        # slots of what was read ahead last, and the mixture and experts that were not there
        self._guessed: Ints = np.empty(0, np.int32)
        self._ahead: tuple[int, Ints] = -1, np.empty(0, np.int32)
        self._precision, self._is_read = 1.0, False  # of guesses that were not in memory
        self.stats = ExpertStats()
        # for measurements: a mixture and its experts that are used; those that are guessed, and
        # which of these were not there
        self.on_use: Callable[[int, list[int]], None] | None = None
        self.on_guess: Callable[[int, list[int], list[int]], None] | None = None

    @property
    def num_slots(self) -> int:
        return len(self._addresses)

    @property
    def num_experts(self) -> int:
        return sum(map(len, self._units))

    @property
    def num_mixtures(self) -> int:
        return len(self._units)

    @property
    def all_units(self) -> list[Unit]:
        return [unit for units in self._units for unit in units]

    def first_content(self) -> list[tuple[int, int]]:
        """Returns the mixture and the expert of each slot at the start."""
        every = [
            (mixture, expert)
            for expert in range(self._slot_of.shape[1])
            for mixture in range(len(self._units))
            if expert < len(self._units[mixture])
        ]
        return every[: self.num_slots]

    def content(self) -> list[tuple[int, int]]:
        """Returns the mixtures and experts that are in memory now."""
        return [(int(mixture), int(expert)) for mixture, expert in self._owner if mixture >= 0]

    def fill(self, slot: int, mixture: int, expert: int) -> None:
        """Notes that a slot has an expert, whose read has ended."""
        self._slot_of[mixture, expert] = slot
        self._owner[slot] = mixture, expert

    def compute(
        self,
        mixture: int,
        x: Tensor,
        routing: Routing,
        residual: Tensor | None,
        guess: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Computes an ExpertsOp of a mixture. guess: returns the experts that the next one will
        probably use."""
        if not routing.experts.numel():
            return x if residual is None else residual
        wanted = np.unique(routing.experts.numpy())
        self._note(mixture, wanted)
        self._forget_failed(mixture, wanted)
        self._bring(mixture, wanted, wanted)
        if guess is not None and len(wanted) <= self.num_slots:
            self._read_ahead(mixture + 1, np.unique(guess().numpy()), mixture, wanted)
        is_there = self._come(mixture, wanted)
        if not is_there.all():
            size = bytes_of_pairs(routing, self._num_out)
            if len(wanted) > self.num_slots or size <= MAX_SUM_BYTES:
                return self._as_they_come(mixture, wanted, is_there, x, routing, residual)
            self._wait(mixture, wanted)
        return self._op(x, self._in_slots(mixture, routing), residual)

    def _note(self, mixture: int, wanted: Ints) -> None:
        """Counts how the experts of a step are found."""
        if mixture == 0:
            self._heat *= DECAY
        self._heat[mixture, wanted] += 1
        slots = self._slot_of[mixture, wanted]
        late = sum(slot in self._fetches and not self._fetches[slot].is_done for slot in slots)
        misses = int((slots < 0).sum())
        self.stats.misses += misses
        self.stats.late += late
        self.stats.hits += len(wanted) - misses - late
        self._judge(mixture, wanted)
        if self.on_use is not None:
            self.on_use(mixture, wanted.tolist())

    def _judge(self, mixture: int, wanted: Ints) -> None:
        """Learns how many of the guesses come true, whether they were read or not."""
        guessed, missing = self._ahead
        if guessed != mixture or not len(missing):
            return
        self._ahead = -1, missing  # a step of many rows guesses nothing after it
        used = int(np.isin(missing, wanted).sum())
        if self._is_read:
            self.stats.used_guesses += used
        weight = min(1.0, _LEARNING * len(missing))
        self._precision += weight * (used / len(missing) - self._precision)

    def _read_ahead(self, mixture: int, experts: Ints, now: int, used: Ints) -> None:
        """Reads what the next mixture will probably use, beside what is used now, as long as most
        guesses come true."""
        self._ahead = mixture, experts[self._slot_of[mixture, experts] < 0]
        if self.on_guess is not None:
            self.on_guess(mixture, experts.tolist(), self._ahead[1].tolist())
        has_room = len(experts) + len(used) <= self.num_slots
        self._is_read = has_room and self._precision >= LEAST_PRECISION
        if not self._is_read:
            return
        self.stats.guesses += len(self._ahead[1])
        used_slots = self._slot_of[now, used]
        self._forget_failed(mixture, experts)
        self._bring(mixture, experts, experts, used_slots)
        self._guessed = self._slot_of[mixture, experts]

    def _bring(
        self, mixture: int, experts: Ints, kept: Ints, kept_slots: Ints | None = None
    ) -> None:
        """Starts to read those experts that have no slot, into the slots of the least used ones,
        but for `kept` of this mixture and other slots, and what was read ahead. Those for which
        there is no slot are left out."""
        missing = experts[self._slot_of[mixture, experts] < 0]
        if not len(missing):
            return
        owner = self._owner
        cost = np.where(owner[:, 0] < 0, -1.0, self._heat[owner[:, 0], owner[:, 1]])
        present = self._slot_of[mixture, kept]
        cost[present[present >= 0]] = np.inf
        if kept_slots is not None:
            cost[kept_slots] = np.inf
        guessed = self._guessed[np.isfinite(cost[self._guessed])]
        if int(np.isfinite(cost).sum()) - len(guessed) >= len(missing):
            cost[guessed] = np.inf
        free = np.argsort(cost, kind="stable")[: int(np.isfinite(cost).sum())]
        for slot, expert in zip(free, missing, strict=False):
            self._read(int(slot), mixture, int(expert))

    def _forget_failed(self, mixture: int, experts: Ints) -> None:
        """Experts that were read ahead and did not come are read again."""
        for slot in self._slot_of[mixture, experts].tolist():
            fetch = self._fetches.get(slot)
            if fetch is not None and fetch.is_done and fetch.error is not None:
                self._empty(slot)

    def _empty(self, slot: int) -> None:
        mixture, expert = self._owner[slot]
        if mixture >= 0:
            self._slot_of[mixture, expert] = -1
        self._owner[slot] = -1
        self._fetches.pop(slot, None)

    def _read(self, slot: int, mixture: int, expert: int) -> None:
        fetch = self._fetches.get(slot)
        if fetch is not None:
            fetch.join()
        self._empty(slot)
        unit = self._units[mixture][expert]
        assert self.reader is not None
        self._fetches[slot] = self.reader.fetch(unit, self._addresses[slot])
        self.fill(slot, mixture, expert)

    def _come(self, mixture: int, experts: Ints) -> Ints:
        """Returns which of the experts are in memory. WeightsLostError for one that does not
        come."""
        slots = self._slot_of[mixture, experts].tolist()
        return np.array([slot >= 0 and self._has_come(slot) for slot in slots])

    def _has_come(self, slot: int) -> bool:
        fetch = self._fetches.get(slot)
        if fetch is not None and not fetch.is_done:
            return False
        if fetch is not None:
            self._wait_for(slot)
        return True

    def _wait(self, mixture: int, experts: Ints) -> None:
        """Waits for experts that have a slot. WeightsLostError."""
        for slot in self._slot_of[mixture, experts].tolist():
            if slot in self._fetches:
                self._wait_for(slot)

    def _wait_for(self, slot: int) -> None:
        fetch = self._fetches[slot]
        assert self.reader is not None
        try:
            self.reader.wait(fetch)
        except BaseException:
            if fetch.is_done:
                self._empty(slot)
            raise
        del self._fetches[slot]

    def _in_slots(self, mixture: int, routing: Routing) -> Routing:
        slots = self._slot_of[mixture, routing.experts.numpy()]
        return Routing(torch.from_numpy(slots), routing.weights)

    def _as_they_come(
        self,
        mixture: int,
        left: Ints,
        is_there: Ints,
        x: Tensor,
        routing: Routing,
        residual: Tensor | None,
    ) -> Tensor:
        """Computes the experts that are there, and then always those that came meanwhile. Slots of
        what has been computed are for those that had none."""
        sums = PairSums(self._op, x, routing, self._num_out, scales_input=self._scales_input)
        while True:
            if is_there.any():
                group, left = left[is_there], left[~is_there]
                sums.compute(group, self._slot_of[mixture, group])
                if not len(left):
                    return sums.total(residual)
                self._bring(mixture, left, left)
            else:
                slots = set(self._slot_of[mixture, left].tolist())
                self._wait_for(next(slot for slot in self._fetches if slot in slots))
            is_there = self._come(mixture, left)


class StreamedExperts:
    """The ExpertsOp of one mixture. router: that of the next mixture, for guesses, and what turns
    this one's input into that one's."""

    def __init__(self, slots: ExpertSlots, mixture: int) -> None:
        self._slots, self._mixture = slots, mixture
        self.route: Callable[[Tensor, Router], Routing] | None = None
        self.router: Router | None = None
        self.ratio: Tensor | None = None

    def __call__(self, x: Tensor, routing: Routing, residual: Tensor | None = None) -> Tensor:
        can_guess = self.router is not None and len(x) <= _MAX_GUESS_ROWS
        guess = (lambda: self._next_experts(x)) if can_guess else None
        return self._slots.compute(self._mixture, x, routing, residual, guess)

    def _next_experts(self, x: Tensor) -> Tensor:
        assert self.route is not None and self.router is not None
        read = x if self.ratio is None else (x * self.ratio).to(x.dtype)
        return self.route(read, self.router).experts
