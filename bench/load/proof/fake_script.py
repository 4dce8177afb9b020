"""What the fake server does with each request, known beforehand: everything follows from a seed
and the number that the prompt carries. Pure; the proof computes the truth from it."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import dataclass
from enum import StrEnum

_NUMBER = re.compile(rb"fake-(\d+)")


class Fault(StrEnum):
    """REFUSED: 429 at once. BROKEN: the connection is closed in the middle. ERROR: told inside the
    stream."""

    NONE = "none"
    REFUSED = "refused"
    BROKEN = "broken"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Profile:
    """Ranges, each uniform. fault_rate: for each kind of fault. stall: the server writes nothing
    from stall_at_s after its first numbered request came, for stall_s; then all at once."""

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
    """chunks_s: from the request's arrival, when each piece of text is due; a fault comes instead
    of the last. empty_s: when a chunk without text is due, if at all."""

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
    """When something due at at_s is written; both from the first numbered request's arrival."""
    end_s = profile.stall_at_s + profile.stall_s
    return end_s if profile.stall_at_s <= at_s < end_s else at_s


def prompt_of(index: int) -> str:
    return f"fake-{index}"


def index_of(body: bytes) -> int | None:
    """None: no numbered request (a warm-up, a probe)."""
    found = _NUMBER.search(body)
    return int(found[1]) if found else None
