"""Which optimisation is off, what stands in its place, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.ablation.parts import PrefillFirst, StaticBatches, serial_core
from serve.engine.loader import Parts
from serve.errors import ConfigError

OURS, SHORT = "ours", "short memory"


@dataclass(frozen=True, slots=True)
class Variant:
    """An engine without one optimisation. settings: those beside the run's. against: the variant
    that has the optimisation. is_exact: it has the same arithmetic as "ours", so the same tokens.
    has_rate: latency at a rate is measured, too. claim: the original system's figure."""

    name: str
    optimisation: str = ""
    claim: str = ""
    against: str = OURS
    settings: dict[str, Any] = field(default_factory=dict)
    parts: Parts = field(default_factory=Parts)
    is_exact: bool = True
    is_short: bool = False
    has_rate: bool = True


_POOLS = Variant("one thread", "pipelined pools", "+10-20 %", parts=Parts(core=serial_core))
_STEPS = Variant("prompts first", "merged step", "(below)", parts=Parts(scheduler=PrefillFirst))
_STATIC = Variant(
    "static batches", "dynamic batching", "+100 %", parts=Parts(scheduler=StaticBatches)
)


def _short(name: str, **settings: Any) -> Callable[..., Variant]:
    def make(optimisation: str, claim: str, *, is_exact: bool = True) -> Variant:
        return Variant(
            name,
            optimisation,
            claim,
            against=SHORT,
            settings=settings,
            is_exact=is_exact,
            is_short=True,
            has_rate=False,
        )

    return make


def all_variants(plain: str | None, *, ends_early: bool) -> list[Variant]:
    """Returns all variants. plain: the type of products that are not int8, None where ours are not
    int8 either. ends_early: answers end before max_tokens; otherwise reserving max_tokens is as
    good as knowing the length."""
    found = [Variant(OURS), _POOLS, _STEPS, _STATIC]
    found.append(Variant(SHORT, against=OURS, is_short=True, has_rate=False))
    if ends_early:
        reserve = _short("max_tokens reserved", memory_policy="worst_case")
        found.append(reserve("predicted lengths", "+200 %"))
    greedy = _short("prompt only", memory_policy="prompt_only")
    found.append(greedy("predicted lengths", ""))
    if plain is not None:
        kv = _short(f"{plain} K/V", kv_dtype=plain)
        found.append(kv("int8 K/V, same bytes", "2x at once", is_exact=False))
        products = {"dtype": plain, "kv_dtype": "int8"}
        found.append(
            Variant(f"{plain} products", "int8 products", "~2x", settings=products, is_exact=False)
        )
    return found


def chosen(variants: list[Variant], names: list[str] | None) -> list[Variant]:
    """Returns the named variants and those they are compared with. Raises ConfigError."""
    if names is None:
        return variants
    known = {variant.name: variant for variant in variants}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"variants: {', '.join(unknown)}; there are {', '.join(known)}")
    wanted = {OURS, *names, *(known[name].against for name in names)}
    return [variant for variant in variants if variant.name in wanted]
