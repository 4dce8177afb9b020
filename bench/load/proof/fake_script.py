"""The script of the fake server. A seed and the number in the prompt determine the answer to each
request, and the proof computes the true figures from the script."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import dataclass
from enum import StrEnum

_NUMBER = re.compile(rb"fake-(\d+)")


class Fault(StrEnum):
    """REFUSED requests get 429 at once; the connection of BROKEN ones closes in the middle;
    ERROR ones get an error inside the stream."""

    NONE = "none"
    REFUSED = "refused"
    BROKEN = "broken"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Profile:
    """Uniform ranges of the script's times and sizes. fault_rate is the rate of each kind of fault.
    From stall_at_s after the first numbered request arrived, the server writes nothing for stall_s
    and then everything at once."""

    seed: int = 0
    first_s: tuple[float, float] = (0.02, 0.08)
    gap_s: tuple[float, float] = (0.005, 0.015)
    chunks: tuple[int, int] = (2, 12)
    chunk_tokens: tuple[int, int] = (1, 4)
    prompt_tokens: tuple[int, int] = (1, 500)
    empty_first_rate: float = 0.5
    fault_rate: float = 0.0
    stall_at_s: float = 0.0
    stall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Script:
    """The answer to a request. chunks_s are the times at which pieces of text are due, in seconds
    from the request's arrival; a fault replaces the last piece. A chunk without text is due at
    empty_s, unless it is None."""

    chunks_s: list[float]
    chunk_tokens: list[int]
    prompt_tokens: int
    empty_s: float | None
    fault: Fault


def script_of(profile: Profile, index: int) -> Script:
    rng = random.Random(profile.seed * 1_000_003 + index)
    count = rng.randint(*profile.chunks)
    first_s = rng.uniform(*profile.first_s)
    gaps_s = [rng.uniform(*profile.gap_s) for _ in range(count - 1)]
    tokens = [rng.randint(*profile.chunk_tokens) for _ in range(count)]
    prompt_tokens = rng.randint(*profile.prompt_tokens)
    empty_s = first_s / 2 if rng.random() < profile.empty_first_rate else None
    number = int(rng.random() / profile.fault_rate) if profile.fault_rate else 3
    faults = (Fault.REFUSED, Fault.BROKEN, Fault.ERROR)
    fault = faults[number] if number < len(faults) else Fault.NONE
    chunks_s = list(itertools.accumulate(gaps_s, initial=first_s))
    return Script(chunks_s, tokens, prompt_tokens, empty_s, fault)


def after_stall(profile: Profile, at_s: float) -> float:
    """Returns when a chunk due at at_s is written; both are seconds from the first numbered
    request's arrival."""
    end_s = profile.stall_at_s + profile.stall_s
    return end_s if profile.stall_at_s <= at_s < end_s else at_s


def prompt_of(index: int) -> str:
    return f"fake-{index}"


def index_of(body: bytes) -> int | None:
    """Returns the request's number, or None for a warm-up or a probe."""
    match = _NUMBER.search(body)
    return int(match[1]) if match else None
