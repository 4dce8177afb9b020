"""A machine and a model for the simulator: the cost of steps and the sizes of K/V memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from bench.plan.calibrate import FittedCost
from bench.plan.capacity import kv_bytes
from bench.plan.cost import MachineCost, StepCost
from bench.plan.efficiency import expected
from bench.plan.grid import Grid, GridCost
from bench.plan.grid_search import kv_bytes_of
from bench.plan.hardware import Device, load_devices
from bench.plan.pipeline import StageCost
from bench.plan.run import find_machine, find_precision, require_divisible
from bench.plan.shapes import Precision, Shape, load_shape
from bench.plan.tables import ASSUMED, meanings
from bench.simulate.settings import SimulationSettings
from memory.pages.layer_groups import LayerGroup
from serve.config import EngineConfig
from serve.errors import ConfigError

DEFAULT_MACHINE = "h100-sxm"
TILE_TOKENS = 16
_GPU_PAGE_BYTES = 2 << 20
_GPU_BATCHED_TOKENS = 2048
_MIN_PAGE_BYTES = 16 << 10
_MAX_PAGES = 30_000
_GRID = re.compile(r"(.+):([0-9]{1,4})x([0-9]{1,4})(?:x([0-9]{1,4}))?")  # device:tp x spp x kvp
_DTYPES = {"auto": "int8", "int4-searched": "int4"}  # those that cost the same


class SimulatedMachine(NamedTuple):
    """A machine and the engine's settings on it. name is the machine's name in reports, and notes
    are what a report must state about it, such as that step times are not measured."""

    name: str
    cost: StepCost | StageCost
    settings: SimulationSettings
    notes: tuple[str, ...] = ()


def simulated_machine(
    model: str, machine: str | None, engine: Mapping[str, Any]
) -> SimulatedMachine:
    """Returns a machine with the engine's settings on it.

    model is a name or path for load_shape. machine is a name of `serve plan` ("4xh100-sxm",
    "here"), a grid of its devices with tp, spp and kvp ("h100-sxm:8x4x1", "h100-sxm:8x4"), or the
    file of a fitted cost (FittedCost.save), which needs kv_cache_bytes. engine has settings of
    EngineConfig. Raises ConfigError for unknown names and if memory is too small.
    """
    shape = load_shape(model)
    config = EngineConfig.from_settings(**engine)
    dtype = _DTYPES.get(config.dtype, config.dtype)
    precision = find_precision(dtype, config.kv_dtype, shape)
    name = machine or DEFAULT_MACHINE
    cost: StepCost | StageCost
    notes: tuple[str, ...] = ()
    if name.endswith(".json"):
        cost, kind, room = FittedCost.load(Path(name)), "cpu", None
    elif matched := _GRID.fullmatch(name):
        longest = config.max_model_len or shape.max_model_len
        cost = grid_cost = _grid_cost(matched, shape, precision, longest)
        kind, room = grid_cost.device.kind, int(kv_bytes_of(grid_cost))
        _require_room(name, shape, room)
        notes = _notes(name, grid_cost.device, is_assumed=grid_cost.is_assumed)
        if grid_cost.grid.kvp > 1:
            notes += (f"machine {name}: all K/V counts as one memory, whichever holder has room",)
    else:
        device = find_machine(name, load_devices())
        require_divisible(name, device, shape)
        kind = device.device.kind
        cost = machine_cost = MachineCost(shape, precision, device, expected(kind, precision))
        room = int(kv_bytes(machine_cost))
        _require_room(name, shape, room)
        notes = _notes(name, device.device, is_assumed=machine_cost.is_assumed)
    config = _sized(config, shape, precision, kind, room)
    groups = tuple(
        LayerGroup(int(token_bytes), TILE_TOKENS, window)
        for window, token_bytes in shape.kv_by_window(precision).items()
    )
    return SimulatedMachine(name, cost, SimulationSettings(config, groups), notes)


def _grid_cost(
    matched: re.Match[str], shape: Shape, precision: Precision, longest: int
) -> GridCost:
    devices = load_devices()
    name, tp, spp, kvp = matched.groups()
    if name not in devices:
        raise ConfigError(f"machine {matched[0]!r}: {name} is not one of: {', '.join(devices)}")
    grid, device = Grid(int(tp), int(spp), int(kvp or 1)), devices[name]
    segment = ceil(longest / grid.kvp)
    efficiency = expected(device.kind, precision)
    try:
        return GridCost(shape, precision, device, grid, efficiency, segment_tokens=segment)
    except ConfigError as error:
        raise ConfigError(f"machine {matched[0]!r}: {error}") from None


def _require_room(name: str, shape: Shape, room: int) -> None:
    if room <= 0:
        raise ConfigError(f"machine {name}: no room for the weights of {shape.name}")


def _notes(name: str, device: Device, *, is_assumed: bool) -> tuple[str, ...]:
    return tuple(
        f"{'step times of' if mark == ASSUMED else 'machine'} {name}: {meaning}"
        for mark, meaning in meanings([device], is_assumed).items()
    )


def _sized(
    config: EngineConfig, shape: Shape, precision: Precision, kind: str, room: int | None
) -> EngineConfig:
    """Returns the settings with the sizes that an engine would choose at its start
    (serve/loading/kv_sizing.py)."""
    token_bytes = int(shape.kv_token_bytes(precision))
    longest = config.max_model_len or shape.max_model_len
    if longest > shape.max_model_len:
        raise ConfigError(f"max_model_len {longest} is above the model's {shape.max_model_len}")
    if config.kv_cache_bytes is None and room is None:
        raise ConfigError("a machine that is a fitted cost needs kv_cache_bytes")
    size = config.kv_cache_bytes or room or 0
    size = min(size, config.max_num_seqs * (longest * token_bytes + _GPU_PAGE_BYTES))
    page = config.kv_page_bytes
    if page is None:
        page = _GPU_PAGE_BYTES if kind == "gpu" else _MIN_PAGE_BYTES
        while page < TILE_TOKENS * token_bytes or (size // page > _MAX_PAGES and kind != "gpu"):
            page *= 2
    if config.max_model_len is None:
        longest = min(longest, max(1, (size // page - 1) * page // token_bytes))
    rows = config.max_num_batched_tokens
    if rows is None and kind == "gpu":
        rows = max(_GPU_BATCHED_TOKENS, config.max_num_seqs)
    return replace(
        config,
        max_model_len=longest,
        kv_cache_bytes=size,
        kv_page_bytes=page,
        max_num_batched_tokens=rows,
    )
