"""The numbers of tokens and sequences that fit into a machine's memory beside the weights."""

from __future__ import annotations

from dataclasses import replace

from bench.plan.cost import MachineCost
from bench.plan.shapes import Precision, Shape
from quant.kv import RECENT_BLOCK


def sequence_bytes(shape: Shape, precision: Precision, context: float) -> float:
    """Returns the bytes of one sequence's K/V and state; layers with a window keep only its tokens.
    int4 K/V has the last tokens in int8, too. A sequence needs a second state only while it
    begins an interval, and earlier ones that the prefix cache keeps give way."""
    kept = sum(
        token_bytes * (context if window is None else min(context, window))
        for window, token_bytes in shape.kv_by_window(precision).items()
    )
    kept += shape.state_bytes
    if precision.kv != "int4":
        return kept
    again = shape.kv_token_bytes(replace(precision, kv="int8"))
    return kept + min(context, RECENT_BLOCK) * again


def kv_bytes(cost: MachineCost) -> float:
    """Returns the bytes for K/V on all devices together, without the weights and the reserve
    (Efficiency.memory), at most what the machine is told; negative if the weights do not fit. If
    devices outnumber the K/V heads, several devices hold the same head, and only one copy
    counts."""
    machine = cost.machine
    room = machine.num_devices * cost.efficiency.memory * machine.device.memory_bytes
    copies = machine.num_devices / min(machine.num_devices, cost.shape.num_kv_heads)
    found = (room - cost.shape.weight_bytes(cost.precision)) / copies
    return found if machine.most_kv_bytes is None else min(found, machine.most_kv_bytes)


def max_tokens(cost: MachineCost) -> int:
    """Returns the number of tokens that fit if no sequence exceeds a window, with one state."""
    room = kv_bytes(cost) - cost.shape.state_bytes
    return max(0, int(room / cost.shape.kv_token_bytes(cost.precision)))


def max_sequences(cost: MachineCost, context: float) -> int:
    """Returns the number of sequences of this context that fit."""
    return max(0, int(kv_bytes(cost) / sequence_bytes(cost.shape, cost.precision, context)))
