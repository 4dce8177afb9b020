"""Whether a call's prompt is computed at another server than its answer, by what servers predict.

Each way costs seconds, of the call itself and of the streams beside it: the wait and the prompt
until the first token; the same prompt once more for each stream that decodes where it is computed;
the hand-over, where two servers share the call; and the answer, at the pace that streams have where
it is decoded. The least sum wins. No server has a role: where prompts were computed lately, streams
are slow, so answers go elsewhere, and where many streams run, prompts do much harm.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

PREFILL_APART = ("auto", "off")
MIN_TOKENS = 128
"""Shorter prompts are not worth the decision."""
GAIN = 0.25
"""The share of the sum that two servers must save where no roles are due: predictions of single
calls are not exact, and a hand-over is a gap that the client sees."""
LOSS = 0.1
"""The share that a call may lose where roles are due."""
_MOST_SHARE = 0.95
_LONGEST_HEADER = 4096


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """What a server says of itself (`x-mergestep-load` of its `/ready`).

    num_streams: the sequences that decode. slowdown, next_slowdown: of prompts beside them, and
    beside one more. prompt_s: what steps have taken for prompts since its start. steps: (streams,
    seconds of their step). prompts: (tokens, seconds to compute them alone, seconds to pull them).
    engine: its id, drawn at its start. listens: others may pull from it. pulls_from: the ids of the
    engines to which it is connected; engines connect only if their pages have the same names.
    """

    num_streams: int
    slowdown: float
    next_slowdown: float
    prompt_s: float
    steps: tuple[tuple[int, float], ...]
    prompts: tuple[tuple[int, float, float], ...]
    engine: str
    listens: bool
    pulls_from: frozenset[str]

    @classmethod
    def read(cls, text: str) -> ServerLoad | None:
        """Returns what a header says; None for anything else than a server's header."""
        if not text or len(text) > _LONGEST_HEADER:
            return None
        try:
            value: dict[str, Any] = orjson.loads(text)
            prompts = tuple((int(n), float(one), float(two)) for n, one, two in value["prompts"])
            found = cls(
                int(value["num_streams"]),
                float(value["slowdown"]),
                float(value["next_slowdown"]),
                float(value["prompt_s"]),
                tuple((int(n), float(seconds)) for n, seconds in value["steps"]),
                tuple(sorted(prompts)),
                str(value["engine"]),
                bool(value["listens"]),
                frozenset(str(one) for one in value["pulls_from"]),
            )
        except (ValueError, TypeError, KeyError):
            return None
        sizes = [n for n, *_ in found.prompts], [n for n, _ in found.steps]
        are_right = all(one == sorted(set(one)) and min(one, default=1) > 0 for one in sizes)
        return found if are_right and found.engine else None

    def can_pull_from(self, other: ServerLoad) -> bool:
        """Whether it is connected to the other one, which listens."""
        return other.listens and other.engine in self.pulls_from

    @property
    def has_learned(self) -> bool:
        """Whether it knows how long its steps take."""
        prompts = any(seconds > 0.0 for _, seconds, _ in self.prompts)
        return prompts and any(seconds > 0.0 for _, seconds in self.steps)

    def prefill_s(self, num_tokens: float) -> float:
        """Returns the seconds to compute a prompt alone."""
        return _between([(n, seconds) for n, seconds, _ in self.prompts], num_tokens)

    def pull_s(self, num_tokens: float) -> float:
        """Returns the seconds to pull a prompt's K/V."""
        return _between([(n, seconds) for n, _, seconds in self.prompts], num_tokens)

    def step_of(self, num_streams: float) -> float:
        """Returns the seconds of a step of so many streams, at least one."""
        return _between(self.steps, max(1.0, num_streams))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A server at this moment. queue_s: its wait. num_streams: those that decode there now.
    prompt_share: the share of its time that it spent on prompts lately. num_new: tokens of the
    prompt that it does not have. handover_s: what a hand-over to it takes beside the pull."""

    load: ServerLoad
    queue_s: float
    num_streams: int
    prompt_share: float
    num_new: float
    handover_s: float

    def first_s(self) -> float:
        """Returns the seconds until the first token."""
        slowdown = self.load.slowdown if self.num_streams else 1.0
        return self.queue_s + self.load.prefill_s(self.num_new) * slowdown

    def harm_s(self) -> float:
        """Returns what the streams of this server lose, all together, by the prompt."""
        return self.num_streams * self.load.prefill_s(self.num_new)

    def answer_s(self, num_output: float) -> float:
        """Returns the seconds of an answer here, and those that it costs the streams beside it."""
        load = self.load
        step_s = load.step_of(self.num_streams + 1)
        # prompts get 1 / slowdown of the time of merged steps
        most = min(_MOST_SHARE, 1.0 / max(1.0, load.next_slowdown))
        pace_s = step_s / (1.0 - min(self.prompt_share, most))
        more_s = max(0.0, step_s - load.step_of(self.num_streams)) if self.num_streams else 0.0
        return num_output * (pace_s + self.num_streams * more_s)

    def move_s(self, num_tokens: float) -> float:
        """Returns the seconds in which a prompt computed elsewhere goes on here."""
        return self.queue_s + self.handover_s + self.load.pull_s(num_tokens)


class Decision(NamedTuple):
    """decode: the candidate that decodes; None: the call stays at one server. prefill: that which
    computes the prompt then. together_s, apart_s: what the best of each way costs; apart_s is inf
    if there is no such way. reason: why it stays, in the words of the metric."""

    prefill: int
    decode: int | None
    together_s: float
    apart_s: float
    reason: str

    def sentence(self, num_tokens: float) -> str:
        """Returns what was decided for a prompt, for people."""
        if self.apart_s == math.inf:
            return f"a prompt is computed where it is decoded: {_WHY[self.reason]}"
        what = f"a prompt of about {num_tokens:.0f} tokens"
        sums = f"{self.apart_s:.2f} s at two servers, {self.together_s:.2f} s at one"
        saves = self.apart_s < self.together_s
        if self.decode is not None:
            why = "" if saves else ", since that serves the calls of late best"
            return f"{what} is computed apart from its answer{why}: {sums}"
        why = f"would save less than {GAIN:.0%}" if saves else "does not pay"
        return f"{what} is computed where it is decoded, since parting {why}: {sums}"


_WHY = {
    "no_peers": "no two ready servers pull K/V from one another",
    "unlearned": "the servers have not learned how long their steps take",
    "short": f"parting begins at {MIN_TOKENS} tokens",
    "unread": "the hop does not know its kind of call",
}


def stays(home: int, reason: str) -> Decision:
    """Returns the decision for one server, for a reason that needs no prediction."""
    return Decision(home, None, 0.0, math.inf, reason)


def decide(
    candidates: Sequence[Candidate | None],
    home: int,
    num_tokens: float,
    num_output: float,
    num_prefill: int = 0,
) -> Decision:
    """Returns which servers a call goes to. candidates: the ready servers, None for one that has no
    K/V peers. home: the one that gets the call if it is not parted. num_output: the tokens that its
    answer is expected to have. num_prefill: how many of the servers should compute prompts for the
    others: then the call is parted unless it would lose by it."""
    at = candidates[home]
    known = [(index, one) for index, one in enumerate(candidates) if one is not None]
    pairs = _pairs(candidates)
    if at is None or not pairs:
        return stays(home, "no_peers")
    if num_tokens < MIN_TOKENS or at.num_new < MIN_TOKENS:
        return stays(home, "short")
    if not all(one.load.has_learned for _, one in known):
        return stays(home, "unlearned")
    together_s = at.first_s() + at.harm_s() + at.answer_s(num_output)
    answers_s = {
        index: one.move_s(num_tokens) + one.answer_s(num_output - 1.0) for index, one in known
    }
    firsts = _prefill_servers(candidates, pairs, num_prefill)
    allowed = [(one, two) for one, two in pairs if one in firsts and two not in firsts]
    if not allowed:  # no roles are due, or none that these servers can have
        firsts, allowed = set(), pairs
    costs_s = {index: one.first_s() + one.harm_s() for index, one in known}
    apart_s, prefill, decode = min(
        (costs_s[one] + answers_s[two], one, two) for one, two in allowed
    )
    gain = -LOSS if firsts else GAIN
    if apart_s < (1.0 - gain) * together_s:
        return Decision(prefill, decode, together_s, apart_s, "")
    return Decision(home, None, together_s, apart_s, "does_not_pay")


def role_counts(candidates: Sequence[Candidate | None]) -> range:
    """Returns how many of these servers can compute prompts for all the others: others must pull
    from each of them, and all the rest must pull from one."""
    pairs = _pairs(candidates)
    firsts, seconds = ({pair[part] for pair in pairs} for part in (0, 1))
    return range(max(1, len(candidates) - len(seconds)), min(len(firsts), len(candidates) - 1) + 1)


def _pairs(candidates: Sequence[Candidate | None]) -> list[tuple[int, int]]:
    """Returns the pairs of servers of which the second one can pull from the first one."""
    known = [(index, one.load) for index, one in enumerate(candidates) if one is not None]
    return [
        (index, other)
        for index, one in known
        for other, two in known
        if index != other and two.can_pull_from(one)
    ]


def _prefill_servers(
    candidates: Sequence[Candidate | None], pairs: Sequence[tuple[int, int]], count: int
) -> set[int]:
    """Returns the servers that compute prompts for the others, among those from which others pull:
    first those that pull from none, then those with the fewest streams, which are those that did so
    up to now."""
    seconds = {two for _, two in pairs}

    def rank(index: int) -> tuple[bool, int, float, int]:
        one = candidates[index]
        assert one is not None
        return index in seconds, one.num_streams, -one.prompt_share, index

    return set(sorted({one for one, _ in pairs}, key=rank)[:count])


def next_server(
    candidates: Sequence[Candidate | None],
    at: int,
    num_tokens: float,
    num_output: float,
    num_prefill: int = 0,
) -> int | None:
    """Returns where the answer goes on after a prompt that was computed at `at`; None: there.
    num_prefill: as for `decide`."""
    here = candidates[at]
    if here is None:
        return None
    costs = [
        (one.move_s(num_tokens) + one.answer_s(num_output), index)
        for index, one in enumerate(candidates)
        if index != at and one is not None and one.load.can_pull_from(here.load)
    ]
    best_s, best = min(costs, default=(math.inf, at))
    gain = -LOSS if num_prefill else GAIN
    return best if best_s < (1.0 - gain) * here.answer_s(num_output) else None


def _between(points: Sequence[tuple[int, float]], tokens: float) -> float:
    """Returns the seconds of so many tokens by those of the lengths around it."""
    if not points:
        return 0.0
    if tokens <= points[0][0] or len(points) == 1:
        return points[0][1] * tokens / points[0][0]
    right = min(len(points) - 1, bisect_left(points, (tokens, 0.0)))
    (from_n, from_s), (to_n, to_s) = points[right - 1], points[right]
    return max(0.0, from_s + (to_s - from_s) * (tokens - from_n) / (to_n - from_n))
