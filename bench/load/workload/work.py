"""What a load consists of: requests, and when each of them is due."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Work:
    """One request: exactly one of messages (a conversation), prompt and token_ids is given.

    max_tokens: None leaves it to the server. ignore_eos: the answer has exactly max_tokens.
    client: who or which application asks (an API's `user`). group: requests of one group belong
    together (a session, a shared prefix).
    """

    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    token_ids: list[int] | None = None
    max_tokens: int | None = None
    ignore_eos: bool = False
    client: str | None = None
    group: str | None = None

    def __post_init__(self) -> None:
        given = [self.messages, self.prompt, self.token_ids]
        assert sum(part is not None for part in given) == 1, "one of them"


@dataclass(frozen=True, slots=True)
class Schedule:
    """works[i] is due arrivals_s[i] seconds after the start; ascending. qps: offered on average;
    infinite: all at once."""

    qps: float
    works: list[Work]
    arrivals_s: list[float]

    def __post_init__(self) -> None:
        assert len(self.works) == len(self.arrivals_s), "one time for each"
