"""What other policies would have had in memory, for the trace of the experts that a run used.

An access is a mixture and the set of its experts that a step used.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.streaming.expert_memory import Access, Expert, Lru, Memory, Oracle
from serve.loading.streaming.experts import DECAY


def lru_hits(trace: Sequence[Access], slots: int, start: Sequence[Expert] = ()) -> float:
    """Returns the share of uses that LRU has in memory. start: what is there at first."""
    return _hits(trace, Lru(slots, start))


def oracle_hits(trace: Sequence[Access], slots: int, start: Sequence[Expert] = ()) -> float:
    """Returns the share of uses that are in memory if what is used again last is dropped."""
    return _hits(trace, Oracle(slots, start, trace))


def _hits(trace: Sequence[Access], memory: Memory) -> float:
    for mixture, experts in trace:
        memory.use(mixture, experts)
    return memory.hits / max(1, memory.uses)


def heat_hits(
    trace: Sequence[Access], slots: int, start: Sequence[Expert] = (), decay: float = DECAY
) -> float:
    """Returns the share of uses that are in memory if what was used least often is dropped; uses
    count less with every step."""
    kept = set(list(start)[:slots])
    heat: dict[Expert, float] = dict.fromkeys(kept, 0.0)
    hits = uses = step = 0
    for mixture, experts in trace:
        step += mixture == 0  # older uses lose weight, as newer ones gain it
        names = [(mixture, expert) for expert in experts]
        for name in names:
            heat[name] = heat.get(name, 0.0) + decay**-step
        missing = [name for name in names if name not in kept]
        hits, uses = hits + len(names) - len(missing), uses + len(names)
        kept |= set(missing)
        coldest = sorted(kept - set(names), key=lambda name: heat[name])
        kept -= set(coldest[: max(0, len(kept) - slots)])
    return hits / max(1, uses)
