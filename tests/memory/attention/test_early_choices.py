"""Early choices of tiles are made where steps with them take less time."""

from __future__ import annotations

from collections import Counter

import pytest

from memory.attention.early_choices import EarlyChoices


class Steps:
    """Steps that take so many seconds without early choices and with them, on a clock of their
    own. share: of what they read, what comes from the file."""

    def __init__(self, without_s: float, with_s: float, share: float = 0.5) -> None:
        self.now_s, self.seconds, self.share = 0.0, {False: without_s, True: with_s}, share
        self.early = EarlyChoices(lambda: self.now_s)
        self.fetched = 0

    def run(self, count: int, rows: int = 4) -> Counter[bool]:
        """Returns how many steps went each way."""
        ways: Counter[bool] = Counter()
        for _ in range(count):
            way = self.early.begin([1] * rows, self.fetched)
            ways[way] += 1
            self.now_s += self.seconds[way]
            self.early.asked(1000)
            self.fetched += int(1000 * self.share)
        return ways


def test_what_is_faster_is_kept():
    slower, faster = Steps(1.0, 1.1), Steps(1.0, 0.8)
    for steps in (slower, faster):
        assert steps.run(32)[True] == 0, "not before a trial"
        assert steps.run(5)[True] >= 3
    assert slower.run(10_000)[True] < 60, "trials become rare"
    assert faster.run(10_000)[False] < 60


def test_a_disk_that_becomes_slow_changes_the_way():
    steps = Steps(1.0, 1.1)
    steps.run(500)
    steps.seconds = {False: 3.0, True: 1.5}
    steps.run(3000)
    assert steps.run(1000)[True] > 900
    steps.seconds = {False: 1.0, True: 1.1}
    steps.run(4000)
    assert steps.run(1000)[True] < 100


@pytest.mark.parametrize("is_faster", [False, True])
@pytest.mark.parametrize("times", [3.0, 0.3])
def test_steps_that_all_take_longer_change_nothing(times, is_faster):
    """Contexts that grow say nothing of what is faster."""
    steps = Steps(1.0, 0.8 if is_faster else 1.1)
    steps.run(2500)
    steps.seconds = {way: seconds * times for way, seconds in steps.seconds.items()}
    assert steps.run(4000)[not is_faster] <= 4 * 5


def test_times_of_earlier_trials_do_not_count():
    steps = Steps(1.0, 1.1)
    ways: Counter[bool] = Counter()
    for _ in range(600):
        ways += steps.run(1)
        steps.seconds = {way: seconds * 1.01 for way, seconds in steps.seconds.items()}
    assert ways[True] <= 4 * 5


def test_one_trial_by_chance_does_not_change_what_several_have_said():
    steps = Steps(1.0, 1.1)
    steps.run(200)  # with several trials
    while not steps.run(1)[True]:
        pass
    steps.seconds = {False: 1.0, True: 0.1}
    steps.run(10)
    steps.seconds = {False: 1.0, True: 1.1}
    assert steps.run(60)[True] == 0


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_nothing_is_tried_where_nearly_all_is_in_memory(share):
    steps = Steps(1.0, 0.5, share)
    steps.run(1)  # nothing is known of what a step reads
    assert steps.run(500)[True] == 0


def test_steps_of_other_rows_do_not_count():
    """Of two loads that take turns, no step is followed by one like it."""
    steps = Steps(1.0, 0.5)
    for number in range(300):
        steps.run(1, rows=2 + number % 2)
    assert not steps.early._ratios


def test_steps_in_which_nothing_selects_are_left_out():
    steps = Steps(1.0, 0.5)
    for _ in range(300):
        steps.run(1)
        steps.now_s += 100.0
        assert not steps.early.begin([], steps.fetched)
    assert not steps.early._ratios
