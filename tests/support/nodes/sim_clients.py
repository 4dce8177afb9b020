"""Clients of the fault simulation: their requests and results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from serve.engine.request_table import RequestState
from serve.request import FinishReason
from tests.support.nodes.sim_model import expected_tokens


@dataclass
class Client:
    """One request and its result."""

    prompt: list[int]
    num_tokens: int
    has_states: bool = False  # the model
    got: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    error: str | None = None
    was_excused: bool = True  # no memory was left when it ended with an error
    is_cancelled: bool = False
    state: RequestState | None = None
    times: list[float] = field(default_factory=list)

    def check(self) -> None:
        expected = expected_tokens(self.prompt, self.num_tokens, self.has_states)
        due = expected[: len(self.got)]
        assert self.got == due, f"wrong tokens: {self.got}, expected {due}"
        if self.reason is FinishReason.ERROR:
            assert self.was_excused, f"ended although there was memory: {self.error}"
        elif self.reason is FinishReason.ABORT:
            assert self.is_cancelled
        else:
            assert self.reason is FinishReason.LENGTH, self.reason
            assert self.got == expected, "tokens are missing"


class Sink:
    """clock: the run's clock. is_excused(client, error): whether the request may end with this
    error."""

    def __init__(
        self,
        client: Client,
        clock: Callable[[], float],
        is_excused: Callable[[Client, str | None], bool],
        problems: list[str],
    ) -> None:
        self._client = client
        self._clock = clock
        self._is_excused = is_excused
        self._problems = problems  # raising would only end the request

    def accept(self, request) -> None:
        pass

    def wake(self) -> None:
        pass

    def fail(self, error: Exception) -> None:
        self._problems.append(f"refused: {error!r}")
        self._client.reason = FinishReason.ERROR

    def push(self, delta) -> None:
        client = self._client
        if client.reason is not None:
            self._problems.append("more after the end")
        client.got += delta.token_ids
        client.times += [self._clock()] * len(delta.token_ids)
        client.reason = delta.finish_reason
        if delta.finish_reason is FinishReason.ERROR:
            client.error = delta.error
            client.was_excused = self._is_excused(client, delta.error)
