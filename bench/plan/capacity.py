"""How many tokens and sequences a machine has memory for, beside the weights."""

from __future__ import annotations

from bench.plan.cost import MachineCost
from bench.plan.shapes import Precision, Shape


def sequence_bytes(shape: Shape, precision: Precision, context: float) -> float:
    """Returns the K/V bytes of one sequence; nothing is kept behind a window."""
    one = shape.kv_layer_bytes(precision)
    return sum(
        layers * one * (context if window is None else min(context, window))
        for window, layers in shape.layers_by_window().items()
    )


def kv_bytes(cost: MachineCost) -> float:
    """Returns the K/V bytes on all devices together, beside the weights and the reserve
    (Efficiency.memory); below 0 where the weights do not fit. Heads that have to be on two devices
    count twice."""
    machine = cost.machine
    room = machine.num_devices * cost.efficiency.memory * machine.device.memory_bytes
    copies = machine.num_devices / min(machine.num_devices, cost.shape.num_kv_heads)
    return (room - cost.shape.weight_bytes(cost.precision)) / copies


def max_tokens(cost: MachineCost) -> int:
    """Returns how many tokens fit, of sequences that no window shortens."""
    return max(0, int(kv_bytes(cost) / cost.shape.kv_token_bytes(cost.precision)))


def max_sequences(cost: MachineCost, context: float) -> int:
    """Returns how many sequences of this context fit."""
    return max(0, int(kv_bytes(cost) / sequence_bytes(cost.shape, cost.precision, context)))
