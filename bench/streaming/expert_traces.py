"""What other policies would have had in memory, for the trace of the experts that a run used.

An access is a mixture and the set of its experts that a step used. LRU drops what was used least
recently; the oracle (Belady) what is used again last, which no policy can beat.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence

from serve.loading.streaming.experts import DECAY

Access = tuple[int, list[int]]
Expert = tuple[int, int]


def lru_hits(trace: Sequence[Access], slots: int, start: Sequence[Expert] = ()) -> float:
    """Returns the share of uses that LRU has in memory. start: what is there at first."""
    kept: OrderedDict[Expert, None] = OrderedDict.fromkeys(list(start)[:slots])
    hits = uses = 0
    for mixture, experts in trace:
        for expert in experts:
            name = mixture, expert
            uses += 1
            hits += name in kept
            kept[name] = None
            kept.move_to_end(name)
            if len(kept) > slots:
                kept.popitem(last=False)
    return hits / max(1, uses)


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


def oracle_hits(trace: Sequence[Access], slots: int, start: Sequence[Expert] = ()) -> float:
    """Returns the share of uses that are in memory if what is used again last is dropped."""
    flat = [(mixture, expert) for mixture, experts in trace for expert in experts]
    times: dict[Expert, list[int]] = {}
    for at, name in enumerate(flat):
        times.setdefault(name, []).append(at)

    def next_use(name: Expert, now: int) -> int:
        uses = times.get(name, [])
        found = bisect_right(uses, now)
        return uses[found] if found < len(uses) else len(flat)

    kept = {name: next_use(name, -1) for name in list(start)[:slots]}
    hits = 0
    for now, name in enumerate(flat):
        hits += name in kept
        kept[name] = next_use(name, now)
        if len(kept) > slots:
            del kept[max(kept, key=lambda each: kept[each])]
    return hits / max(1, len(flat))
