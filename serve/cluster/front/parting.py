"""Parts prompts from decoding, call by call: apart.py decides, this keeps what it decides from."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field

from serve.cluster.front.apart import (
    Candidate,
    Decision,
    decide,
    next_server,
    role_counts,
    stays,
)
from serve.cluster.front.prompt import Lengths, Prompt
from serve.cluster.front.replicas import Choice, Replica, ReplicaSet
from serve.cluster.front.roles import Traffic, num_prefill

logger = logging.getLogger(__name__)

_RECONSIDERED_S = 1.0
_FAILED_S = 5.0  # what a hand-over is taken to last that comes to nothing
# A server computes a prompt that it waits for if no page of it comes for a second, or for twice the
# time that computing it would take; its first page is to be there well before.
_PATIENCE_S, _PATIENCE_TIMES, _PATIENCE_USED = 1.0, 2.0, 0.75


@dataclass(slots=True)
class PartingCounts:
    """num_apart: calls whose prompts were computed apart. num_moved: those of them that went on
    elsewhere then. num_together: calls that were not, by reason. handover_s: of all hand-overs of
    streams together. last: what was decided last, for people."""

    num_apart: int = 0
    num_moved: int = 0
    num_together: dict[str, int] = field(default_factory=dict)
    handover_s: float = 0.0
    last: str = "no call has come yet"


class Parting:
    """Chooses the servers of calls. is_on: the setting allows parting; otherwise every call goes to
    one server, and nothing is counted."""

    def __init__(self, replicas: ReplicaSet, *, is_on: bool) -> None:
        self.replicas = replicas
        self.counts = PartingCounts()
        self.lengths = Lengths()
        self.traffic = Traffic()
        self.num_prefill = 0  # servers that compute prompts for the others
        self._considered_s = 0.0
        self._is_on = is_on

    @property
    def is_on(self) -> bool:
        """Whether any servers pull K/V."""
        return self._is_on and any(replica.load is not None for replica in self.replicas.replicas)

    def choose(
        self, prompt: Prompt, without: Collection[Replica], now_s: float
    ) -> tuple[Choice | None, Replica | None]:
        """Returns the choice for a call that comes at now_s, and the server where it is to go on
        after its prompt; None if it stays."""
        home = self.replicas.best(self._names(prompt), without)
        if home is None:
            return None, None
        if not self.is_on:
            if self._is_on:
                self._note(stays(0, "no_peers"), 0.0)
            return self._take(home, prompt), None
        ready = self.replicas.ready(without)
        num_tokens = self.lengths.of_prompt(prompt)
        decision = self._decide(ready, ready.index(home), prompt, num_tokens, now_s)
        self._note(decision, num_tokens)
        if decision.decode is None:
            return self._take(home, prompt), None
        chosen = ready[decision.prefill]
        at = self.replicas.candidates([chosen], prompt.names, num_tokens)[0]
        cost_s = None if at is None else at.first_s() - at.queue_s
        return self._take(chosen, prompt, cost_s), ready[decision.decode]

    def _take(self, replica: Replica, prompt: Prompt, cost_s: float | None = None) -> Choice:
        return self.replicas.take(replica, self._names(prompt), cost_s)

    def _names(self, prompt: Prompt) -> list[bytes]:
        return prompt.names if self.replicas.looks_at_prompts else []

    def _decide(
        self,
        ready: list[Replica],
        home: int,
        prompt: Prompt,
        num_tokens: float,
        now_s: float,
    ) -> Decision:
        candidates = self.replicas.candidates(ready, prompt.names, num_tokens)
        at, num_output = candidates[home], self.lengths.of_answer(prompt)
        if at is not None and prompt.size:
            self.traffic.note(now_s, at.num_new, num_output)
        self._reconsider(candidates, now_s)
        if not prompt.can_part:
            return stays(home, "unread")
        return decide(candidates, home, num_tokens, num_output, self.num_prefill)

    def _reconsider(self, candidates: list[Candidate | None], now_s: float) -> None:
        """Decides how many servers should compute prompts for the others."""
        if now_s - self._considered_s < _RECONSIDERED_S:
            return
        self._considered_s = now_s
        known = [one for one in candidates if one is not None and one.load.has_learned]
        before, self.num_prefill = self.num_prefill, 0
        if len(known) == len(candidates) > 1 and self.traffic.rate:
            loads = [one.load for one in known]
            handover_s = min(one.handover_s for one in known)
            counts = role_counts(candidates)
            self.num_prefill = num_prefill(loads, self.traffic, handover_s, before, counts)
        if self.num_prefill != before:
            logger.info("%d servers compute prompts for the others", self.num_prefill)

    def _note(self, decision: Decision, num_tokens: float) -> None:
        counts = self.counts
        counts.last = decision.sentence(num_tokens)
        logger.debug("%s", counts.last)
        if decision.decode is not None:
            counts.num_apart += 1
            return
        reason = decision.reason
        counts.num_together[reason] = counts.num_together.get(reason, 0) + 1
        if reason == "does_not_pay":
            self.replicas.note_kept_together()

    def next_server(self, prompt: Prompt, at: Replica) -> Replica | None:
        """Returns where a call goes on whose prompt was computed at `at`, by what is known now;
        None: there."""
        ready = self.replicas.ready()
        if at not in ready:
            return None
        num_tokens = self.lengths.of_prompt(prompt)
        candidates = self.replicas.candidates(ready, prompt.names, num_tokens)
        num_output = self.lengths.of_answer(prompt)
        at_index = ready.index(at)
        index = next_server(candidates, at_index, num_tokens, num_output, self.num_prefill)
        return None if index is None else ready[index]

    def is_soon(self, prompt: Prompt, first: Choice, second: Replica) -> bool:
        """Returns whether the first server computes the prompt so soon that the second one can
        wait for it with the call."""
        if second.load is None:
            return False
        computing_s = second.load.prefill_s(self.lengths.of_prompt(prompt))
        patience_s = max(_PATIENCE_S, _PATIENCE_TIMES * computing_s)
        return first.queue_s + first.cost_s <= _PATIENCE_USED * patience_s

    def moved(self, prompt: Prompt, choice: Choice, seconds: float) -> None:
        """Notes the first token after a hand-over, and the seconds since the last one before it."""
        self.counts.num_moved += 1
        self.counts.handover_s += seconds
        waited_s = min(seconds, choice.queue_s)
        choice.replica.note_handover(seconds - waited_s, self.lengths.of_prompt(prompt))

    def not_moved(self, prompt: Prompt, first: Replica, second: Replica, code: str | None) -> None:
        """Notes that `second` did not go on where `first` had computed the prompt. code: that of
        its refusal."""
        second.note_handover(_FAILED_S, self.lengths.of_prompt(prompt))
        if code == "continuation_differs":
            logger.warning("%s cannot go on with answers of %s", second.url, first.url)
            second.bar(first)
            first.bar(second)
