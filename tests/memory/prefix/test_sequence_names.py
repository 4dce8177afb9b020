"""Names of sequences' pages: what a follower is told, once, and what a peer may wait for."""

from __future__ import annotations

from memory.prefix.sequence_names import ENDED, FOLLOWER_S, SequenceNames

TILE = 4  # tokens of a page


def make(**settings):
    clock = Clock()
    settings = {"min_age_s": 0.0} | settings
    return SequenceNames(lambda page: TILE * (page + 1), clock=clock, **settings), clock


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def names_of(first: int, count: int) -> list[bytes]:
    return [bytes([first, number]) * 8 for number in range(count)]


def test_each_page_is_told_once_and_those_of_generated_tokens_too():
    names, _ = make()
    keys = names_of(1, 3)
    names.queued("a", keys)
    assert names.news("f", 10) == []
    names.computed("a", 2 * TILE + 1)
    assert names.news("f", 10) == [(0, keys[0]), (0, keys[1])]
    assert names.news("f", 10) == []
    names.computed("a", 3 * TILE)
    keys += names_of(2, 2)  # of generated tokens
    names.computed("a", 5 * TILE + 3)
    assert names.news("f", 2) == [(0, keys[2]), (0, keys[3])]
    assert names.news("f", 2) == [(0, keys[4])]
    names.ended("a")
    assert names.news("f", 10) == [(0, ENDED)]
    assert names.news("f", 10) == []


def test_a_sequence_that_ends_soon_is_told_to_nobody():
    names, clock = make(min_age_s=1.0)
    names.queued("a", names_of(1, 2))
    names.computed("a", 2 * TILE)
    assert names.news("f", 10) == []
    clock.now_s += 0.9
    assert names.news("f", 10) == []
    names.ended("a")
    assert names.news("f", 10) == [], "not even its end"
    names.queued("b", names_of(2, 1))
    names.computed("b", TILE)
    names.news("f", 10)
    clock.now_s += 1.0
    assert names.news("f", 10) == [(1, names_of(2, 1)[0])]


def test_followers_share_the_sequences_and_inherit_those_of_one_that_left():
    names, clock = make()
    for follower in "fg":
        names.news(follower, 10)
    for number in range(6):
        names.queued(number, names_of(number, 2))
        names.computed(number, 2 * TILE)
    told = {follower: {number for number, _ in names.news(follower, 99)} for follower in "fg"}
    assert [len(told[follower]) for follower in "fg"] == [3, 3]
    assert told["f"] | told["g"] == set(range(6))
    names.leave("g")
    again = names.news("f", 99)
    assert {number for number, _ in again} == told["g"]
    assert len(again) == 6, "from their beginning"
    clock.now_s += FOLLOWER_S + 0.1  # f is late and loses them
    assert {number for number, _ in names.news("h", 99)} == set(range(6))


def test_a_late_follower_is_told_what_it_has_lost():
    names, clock = make()
    keys = names_of(1, 3)
    names.queued("a", keys)
    names.computed("a", 2 * TILE)
    assert len(names.news("f", 10)) == 2
    clock.now_s += FOLLOWER_S + 0.1
    assert names.news("g", 10) == [(0, keys[0]), (0, keys[1])]
    names.queued("b", names_of(2, 1))
    names.computed("b", TILE)
    assert names.news("g", 10) == [(1, names_of(2, 1)[0])], "f gets none until it asks"
    names.computed("a", 3 * TILE)
    assert names.news("f", 10) == [(0, ENDED)]
    assert names.news("f", 10) == []
    names.ended("a")
    names.queued("c", names_of(3, 1))
    names.computed("c", TILE)
    assert names.news("f", 10) == [(2, names_of(3, 1)[0])], "it has asked"
    assert names.news("g", 10) == [(0, ENDED)]
    names.leave("g")
    assert names.news("f", 10) == [(1, names_of(2, 1)[0])]


def test_a_follower_that_gets_a_sequence_again_is_told_its_end_first():
    names, clock = make()
    keys = names_of(1, 2)
    names.queued("a", keys)
    names.computed("a", 2 * TILE)
    names.news("f", 10)
    clock.now_s += FOLLOWER_S + 0.1
    names.news("g", 10)
    names.leave("g")
    assert names.news("f", 10) == [(0, ENDED), (0, keys[0]), (0, keys[1])]


def test_a_late_follower_that_was_told_nothing_is_forgotten():
    names, clock = make()
    names.news("f", 10)
    clock.now_s += FOLLOWER_S + 0.1
    names.news("g", 10)
    assert names.num_followers == 1


def test_what_is_expected_is_what_is_not_computed_yet():
    names, _ = make()
    keys = names_of(1, 4)
    names.queued("a", list(keys))
    names.queued("b", keys[:2])
    assert all(names.is_expected(key) for key in keys)
    names.computed("a", 3 * TILE)
    assert [names.is_expected(key) for key in keys] == [True, True, False, True]
    names.ended("b")
    assert [names.is_expected(key) for key in keys] == [False, False, False, True]
    names.ended("a")
    names.ended("a")
    names.computed("a", 4 * TILE)
    assert not any(names.is_expected(key) for key in keys)
    assert not names._expected and not names._sequences and not names._running


def test_a_follower_that_comes_and_goes_leaves_nothing_behind():
    names, clock = make()
    for number in range(50):
        names.queued(number, names_of(number % 250, 1))
        names.computed(number, TILE)
        names.news(("f", number), 5)
        clock.now_s += FOLLOWER_S + 0.1
        names.ended(number)
    assert all(len(state.ended) <= 1 for state in names._followers.values()), "each had one"
    for number in range(50):
        names.leave(("f", number))
    assert names.num_followers == 0
    assert not names._running


def test_where_a_sequence_is_copied_can_be_asked():
    names, clock = make()
    keys = names_of(1, 3)
    names.queued("a", keys, "request")
    assert names.copied("request") is None
    names.computed("a", 2 * TILE)
    assert names.copied("request") is None, "no peer has asked"
    names.news("f", 1, "engine f")
    assert names.copied("request") == ("engine f", TILE)
    names.news("f", 9, "engine f")
    assert names.copied("request") == ("engine f", 2 * TILE)
    clock.now_s += FOLLOWER_S + 0.1
    names.news("g", 1, "engine g")
    assert names.copied("request") == ("engine g", TILE)
    names.ended("a")
    assert names.copied("request") is names.copied("other") is None


def test_of_several_sequences_the_last_one_counts():
    names, _ = make()
    for number in range(2):
        names.queued(number, names_of(number, 1), "request")
        names.computed(number, TILE)
    names.news("f", 9, "e")
    names.ended(0)
    assert names.copied("request") == ("e", TILE)
    names.ended(1)
    assert names.copied("request") is None
