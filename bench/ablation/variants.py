"""The variants: which optimisation is off, what replaces it, and what it is compared with."""

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
    """An engine without one optimisation. claim is the gain that the original system (PPL.LLM)
    reports for it. against names the variant that has the optimisation. settings extend those of
    the run. An exact variant has the arithmetic of "ours" and so the same tokens. is_short gives it
    short K/V memory. With has_rate, latency at a rate is measured too."""

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
    """Returns all variants. plain is the type that replaces int8, None if "ours" is not int8.
    Without ends_early all answers have max_tokens, so reserving max_tokens is as good as knowing
    the length, and that variant is left out."""
    variants = [Variant(OURS), _POOLS, _STEPS, _STATIC]
    variants.append(Variant(SHORT, against=OURS, is_short=True, has_rate=False))
    if ends_early:
        reserve = _short("max_tokens reserved", memory_policy="worst_case")
        variants.append(reserve("predicted lengths", "+200 %"))
    greedy = _short("prompt only", memory_policy="prompt_only")
    variants.append(greedy("predicted lengths", ""))
    if plain is not None:
        kv = _short(f"{plain} K/V", kv_dtype=plain)
        variants.append(kv("int8 K/V, same bytes", "2x at once", is_exact=False))
        products = {"dtype": plain, "kv_dtype": "int8"}
        variants.append(
            Variant(f"{plain} products", "int8 products", "~2x", settings=products, is_exact=False)
        )
    return variants


def chosen(variants: list[Variant], names: list[str] | None) -> list[Variant]:
    """Returns the named variants and those with which they are compared; all if names is None.
    Raises ConfigError for unknown names."""
    if names is None:
        return variants
    by_name = {variant.name: variant for variant in variants}
    if unknown := [name for name in names if name not in by_name]:
        raise ConfigError(f"variants: {', '.join(unknown)}; there are {', '.join(by_name)}")
    selected = {OURS, *names, *(by_name[name].against for name in names)}
    return [variant for variant in variants if variant.name in selected]
