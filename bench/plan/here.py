"""This machine as a device: its ceilings, measured in a second, and the memory that is free."""

from __future__ import annotations

import os

import torch

from bench.common.ceilings import Ceiling
from bench.plan.hardware import Device
from ops.cpu import native
from serve.errors import ConfigError
from serve.machine import available_memory

NAME = "here"
READ_BYTES = 256 << 20


def measure_here() -> Device:
    """ConfigError without the native kernels, whose instructions are what is measured."""
    if not native.is_available():
        raise ConfigError("machine here: the native kernels are not built")
    buffer = torch.ones(READ_BYTES, dtype=torch.uint8)
    return device_of(Ceiling.now(buffer))


def device_of(ceiling: Ceiling) -> Device:
    """fp32 multiplies at half the rate of bf16, or at a quarter of int8's where there is no bf16
    (so on Zen and on Xeons without AMX)."""
    operations = {"int8": ceiling.i8, "fp32": ceiling.bf16 / 2 or ceiling.i8 / 4}
    if ceiling.bf16:
        operations["bf16"] = ceiling.bf16
    return Device(
        name=NAME,
        kind="cpu",
        memory_bytes=available_memory(),
        bytes_per_s=ceiling.read,
        operations=operations,
        cache_bytes=_cache_bytes(),
    )


def _cache_bytes() -> float:
    """Of the last level; 0 where the system does not say."""
    try:
        return float(max(0, os.sysconf("SC_LEVEL3_CACHE_SIZE")))
    except (OSError, ValueError):
        return 0.0
