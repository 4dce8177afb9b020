"""Ranks machines, and pairs of compute and memory devices, for a load, an SLO and a budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from bench.plan.capacity import max_sequences, max_tokens
from bench.plan.cost import Machine, MachineCost
from bench.plan.disaggregated import Figures, Split, layer_traffic_bytes
from bench.plan.efficiency import Efficiency, expected
from bench.plan.hardware import Device
from bench.plan.serving import MAX_BATCH, Load, Serving, Slo, best
from bench.plan.shapes import Precision, Shape
from serve.errors import ConfigError

NUMBERS = (1, 2, 4, 8)
MAX_COMPUTE, MAX_MEMORY = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits in dollars per hour and per million output tokens; inf sets no limit."""

    dollars_per_h: float = inf
    dollars_per_m: float = inf

    @property
    def is_given(self) -> bool:
        return min(self.dollars_per_h, self.dollars_per_m) < inf


@dataclass(frozen=True, slots=True)
class Choice:
    """A machine and its figures for the load. reason says why it cannot serve the load: a limit
    of serving.best, the budget or an error; None if it can. is_assumed is that of MachineCost."""

    machine: Machine
    serving: Serving | None
    reason: str | None
    max_sequences: int
    max_tokens: int
    is_assumed: bool = True

    @property
    def dollars_per_m(self) -> float | None:
        """The price of a million output tokens."""
        dollars, serving = self.machine.dollars_per_h, self.serving
        if dollars is None or serving is None:
            return None
        return 1e6 * dollars / (3600 * serving.tokens_per_s)

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine.name,
            "device": self.machine.device.name,
            "num_devices": self.machine.num_devices,
            "dollars_per_h": self.machine.dollars_per_h,
            "watts": self.machine.watts,
            "dollars_per_m": self.dollars_per_m,
            "max_sequences": self.max_sequences,
            "max_tokens": self.max_tokens,
            "reason": self.reason,
            "backend": self.machine.device.backend,
            "is_assumed": self.is_assumed,
            "serving": None if self.serving is None else self.serving.as_json(),
        }


def choose(shape: Shape, precision: Precision, machine: Machine, load: Load, slo: Slo) -> Choice:
    """Returns the most that a machine serves with the expected efficiency of our kernels."""
    try:
        shape.require_divisible(machine.num_devices)
        cost = MachineCost(shape, precision, machine, _efficiency(machine.device, precision))
    except ConfigError as error:
        return Choice(machine, None, str(error), 0, 0)
    serving = best(cost, load, slo)
    return Choice(
        machine,
        None if isinstance(serving, str) else serving,
        serving if isinstance(serving, str) else None,
        max_sequences(cost, load.context),
        max_tokens(cost),
        cost.is_assumed,
    )


def all_machines(devices: Mapping[str, Device]) -> list[Machine]:
    """Returns each device alone and, if it has links to peers, in each of NUMBERS."""
    return [
        Machine(device, number)
        for device in devices.values()
        for number in NUMBERS
        if number == 1 or device.peers is not None
    ]


def rank(
    shape: Shape,
    precision: Precision,
    machines: Iterable[Machine],
    load: Load,
    slo: Slo,
    budget: Budget,
) -> list[Choice]:
    """Returns a choice per machine: first those that serve the load within the budget, cheapest
    tokens first, then those without a price (which no budget admits), fastest first, then those
    that cannot serve it."""
    choices = [choose(shape, precision, machine, load, slo) for machine in machines]
    return sorted((_within(choice, budget) for choice in choices), key=_order)


def _efficiency(device: Device, precision: Precision) -> Efficiency:
    return expected(device.kind, precision)


def _within(choice: Choice, budget: Budget) -> Choice:
    if choice.serving is None or not budget.is_given:
        return choice
    dollars, tokens = choice.machine.dollars_per_h, choice.dollars_per_m
    if dollars is None or tokens is None:
        reason = "no price"
    elif dollars > budget.dollars_per_h or tokens > budget.dollars_per_m:
        reason = "budget"
    else:
        return choice
    return replace(choice, serving=None, reason=reason)


def _order(choice: Choice) -> tuple[bool, bool, float]:
    dollars, serving = choice.dollars_per_m, choice.serving
    if serving is None:
        return True, True, float(choice.machine.num_devices)
    return False, dollars is None, -serving.tokens_per_s if dollars is None else dollars


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """A configuration of `a` compute devices and b memory devices. network_bytes_per_s is the rate
    of all links together, used_bytes_per_s the traffic over them, which never exceeds that rate as
    the figures include the network's times. figures.required_bytes_per_s is the rate at which one
    batch is a fifth slower (disaggregated.SLOWDOWN)."""

    compute: Device
    memory: Device
    a: int
    b: int
    figures: Figures
    network_bytes_per_s: float
    used_bytes_per_s: float
    is_assumed: bool = True

    @property
    def name(self) -> str:
        return f"({self.a} {self.compute.name}, {self.b} {self.memory.name})"

    def as_json(self) -> dict[str, Any]:
        return self.figures.as_json() | {
            "name": self.name,
            "network_bytes_per_s": self.network_bytes_per_s,
            "used_bytes_per_s": self.used_bytes_per_s,
            "backends": [self.compute.backend, self.memory.backend],
            "is_assumed": self.is_assumed,
        }


def rank_splits(
    shape: Shape,
    precision: Precision,
    devices: Sequence[Device],
    load: Load,
    slo: Slo,
    budget: Budget,
) -> list[SplitChoice]:
    """Returns the best (a, b) for each pair of a GPU that computes and a device that holds K/V: the
    one with the most tokens per dollar or, without a price, per device. Only tpot_s of the SLO
    applies, since prompts are computed elsewhere. Sequences are in the middle of their answers."""
    splits = [
        split
        for one in devices
        for other in devices
        if one.kind == "gpu"
        and (split := _best_split(shape, precision, one, other, load, slo, budget)) is not None
    ]
    return sorted(splits, key=lambda choice: _worth(choice.figures, choice.a + choice.b))[::-1]


def _best_split(
    shape: Shape,
    precision: Precision,
    compute: Device,
    memory: Device,
    load: Load,
    slo: Slo,
    budget: Budget,
) -> SplitChoice | None:
    if compute.network is None or memory.network is None:
        return None
    efficiencies = _efficiency(compute, precision), _efficiency(memory, precision)
    split = Split(shape, precision, compute, memory, efficiencies)
    context = load.prompt + load.output / 2
    candidates = []
    for a in range(1, MAX_COMPUTE + 1):
        for b in range(1, MAX_MEMORY + 1):
            try:
                figures = split.figures(context, a, b, tpot_s=slo.tpot_s, max_batch=MAX_BATCH)
            except ConfigError:  # a device cannot compute in this precision
                return None
            if figures is not None and _affordable(figures, budget):
                candidates.append((_worth(figures, a + b), a, b, figures))
    if not candidates:
        return None
    _, a, b, figures = max(candidates, key=lambda item: item[0])
    links = min(a, b) * min(compute.network.bytes_per_s, memory.network.bytes_per_s)
    used = figures.tokens_per_s * shape.num_layers * layer_traffic_bytes(shape)
    is_assumed = not all(
        shares.is_measured and device.is_measured
        for shares, device in zip(efficiencies, (compute, memory), strict=True)
    )
    return SplitChoice(compute, memory, a, b, figures, links, used, is_assumed)


def _worth(figures: Figures, num_devices: int) -> tuple[bool, float]:
    """Returns a sort key in which configurations with a price rank above those without."""
    per_dollar = figures.tokens_per_dollar
    if per_dollar is None:
        return False, figures.tokens_per_s / num_devices
    return True, per_dollar


def _affordable(figures: Figures, budget: Budget) -> bool:
    per_dollar, dollars = figures.tokens_per_dollar, figures.dollars_per_h
    if per_dollar is None or dollars is None:
        return not budget.is_given
    return dollars <= budget.dollars_per_h and 1e6 / per_dollar <= budget.dollars_per_m
