"""`serve plan`: predicts a model's latency, throughput and price on machines and compares them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.common.plot_style import require_matplotlib
from bench.plan.beyond_memory import Beyond, BeyondMemory, beyond_memory, print_beyond
from bench.plan.cost import Machine, MachineCost
from bench.plan.efficiency import BOUND, expected
from bench.plan.hardware import HERE, Device, load_devices, measure_here
from bench.plan.kv_beyond_memory import (
    KVBeyondMemory,
    KVOffload,
    kv_beyond_memory,
    print_kv_beyond,
)
from bench.plan.plots import plot
from bench.plan.search import Budget, all_machines, rank, rank_splits
from bench.plan.serving import Load, Slo
from bench.plan.shapes import KV, WEIGHTS, Precision, Shape, load_shape
from bench.plan.tables import details, print_details, print_ranking, print_splits
from serve.errors import ConfigError

BATCHES = (1, 8, 16, 32, 64, 128)
CONTEXTS = (512, 2048, 8192)
PROMPT, OUTPUT = 1024, 256  # tokens; less where the context is too short
_COUNTED = re.compile(r"(?:([0-9]{1,3})x)?(.+)")


def run(
    model: str = "default",
    *,
    hardware: Path | None = None,
    machines: Sequence[str] = (),
    dtype: str = "int8",
    kv_dtype: str = "auto",
    prompt: int | None = None,
    output: int | None = None,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] | None = None,
    ttft_s: float | None = None,
    tpot_ms: float | None = None,
    usd_per_h: float | None = None,
    usd_per_m: float | None = None,
    disaggregated: bool = False,
    offload: KVOffload | None = None,
    weights: Beyond | None = None,
    top: int = 15,
    json_file: Path | None = None,
    png_file: Path | None = None,
) -> dict[str, Any]:
    """Prints the predictions and returns them as they are written to json_file.

    model is a name of models.toml, a checkpoint's directory or its config.json. hardware is a TOML
    file with more devices, or with other figures for those in hardware.toml. machines are names,
    "here" (measured now) or several devices, such as "4xh100-sxm": one machine is shown in detail,
    several are compared, and an empty list compares all devices, alone and as 2, 4 and 8.
    prompt and output are a request's tokens; None takes PROMPT and OUTPUT, or what the context has
    room for. batches and contexts are the rows and columns of one machine's table. ttft_s and
    tpot_ms are the SLO, usd_per_h and usd_per_m (dollars per million output tokens) the budget.
    disaggregated also ranks pairs of compute and memory devices. offload: K/V of the one machine
    that is also in a file; its memory is that of all K/V then. weights: its weights beyond memory.
    top is the number of rows of the comparison. png_file is not written if no machine meets the SLO
    within the budget. "is_served" of the result: a machine or a pair does, or without SLO and
    budget weights beyond memory are predicted. Raises ConfigError that names the wrong argument.
    """
    shape = load_shape(model)
    if disaggregated:
        shape.require_no_states("compute and memory devices")
    precision = find_precision(dtype, kv_dtype, shape)
    load, contexts = _lengths(shape, prompt, output, contexts)
    _require_counts("batch", batches)
    _require_counts("top", [top])
    bounds = ttft_s, tpot_ms, usd_per_h, usd_per_m
    slo, budget = _slo_and_budget(*bounds)
    if png_file is not None:
        require_matplotlib()
    devices = load_devices(hardware)
    chosen = [find_machine(name, devices) for name in machines]
    for name, machine in zip(machines, chosen, strict=True):
        require_divisible(name, machine, shape)
    if offload is not None and len(chosen) != 1:
        raise ConfigError("kv-offload-bytes needs exactly one machine")
    if offload is not None:
        chosen = [replace(chosen[0], most_kv_bytes=offload.memory_bytes)]
    if weights not in (None, Beyond()) and len(chosen) != 1:
        raise ConfigError("weights beyond memory need exactly one machine")
    console = Console()
    console.width = max(console.width, 120)
    result: dict[str, Any] = {
        "model": asdict(shape) | {"num_parameters": shape.num_parameters},
        "precision": asdict(precision),
        "load": asdict(load),
    }
    if len(chosen) == 1:
        cost, bound = _costs(shape, precision, chosen[0])
        asked = weights or Beyond()
        beyond, in_file = _predict_beyond(cost, batches, contexts, devices, asked, offload)
        detailed = details(cost, bound, batches, contexts)
        print_details(detailed, load, console, is_beyond=beyond is not None)
        result |= {"details": detailed.as_json()} | _beyond(beyond, in_file, console)
    listed = chosen or [Machine(device) for device in devices.values()]
    choices = rank(shape, precision, chosen or all_machines(devices), load, slo, budget)
    # nothing was asked that the prediction of weights beyond memory does not answer
    is_answered = "beyond_memory" in result and all(each is None for each in bounds)
    is_served = any(choice.serving is not None for choice in choices)
    if is_served or not is_answered:
        print_ranking(choices, load, top, console)
    result["machines"] = [choice.as_json() for choice in choices]
    if disaggregated:
        kinds = list({machine.device.name: machine.device for machine in listed}.values())
        splits = rank_splits(shape, precision, kinds, load, slo, budget)
        print_splits(splits, top, console)
        result["disaggregated"] = [split.as_json() for split in splits]
    result["is_served"] = is_served or is_answered or bool(result.get("disaggregated"))
    drawn = [choice.machine for choice in choices if choice.serving is not None][:top]
    if png_file is not None and drawn:
        costs = [_costs(shape, precision, machine)[0] for machine in drawn]
        plot(costs, bound if len(chosen) == 1 else None, load, slo, png_file)
    if json_file is not None:
        _write(json_file, result)
    return result


def _slo_and_budget(
    ttft_s: float | None, tpot_ms: float | None, usd_per_h: float | None, usd_per_m: float | None
) -> tuple[Slo, Budget]:
    """ConfigError."""
    slo = Slo(
        ttft_s=_bound("ttft", ttft_s),
        tpot_s=_bound("tpot", tpot_ms) / 1e3,
    )
    budget = Budget(
        dollars_per_h=_bound("usd-per-hour", usd_per_h),
        dollars_per_m=_bound("usd-per-million", usd_per_m),
    )
    return slo, budget


def _predict_beyond(
    cost: MachineCost,
    batches: Sequence[int],
    contexts: Sequence[int],
    devices: dict[str, Device],
    weights: Beyond,
    offload: KVOffload | None,
) -> tuple[BeyondMemory | None, KVBeyondMemory | None]:
    """Returns what is predicted of weights and of K/V that are not all in memory. ConfigError."""
    kv_bytes = None if offload is None else offload.memory_bytes
    context = min(contexts)
    beyond = beyond_memory(cost, batches, context, devices, weights, kv_cache_bytes=kv_bytes)
    if offload is None:
        return beyond, None
    return beyond, kv_beyond_memory(cost, offload, batches, contexts, beyond)


def _beyond(
    weights: BeyondMemory | None, in_file: KVBeyondMemory | None, console: Console
) -> dict[str, Any]:
    """Prints and returns what is predicted of weights and of K/V that are not all in memory."""
    result: dict[str, Any] = {}
    if weights is not None:
        print_beyond(weights, console)
        result["beyond_memory"] = weights.as_json()
    if in_file is not None:
        print_kv_beyond(in_file, console)
        result["kv_beyond_memory"] = in_file.as_json()
    return result


def find_precision(dtype: str, kv_dtype: str, shape: Shape) -> Precision:
    """Returns the precision of two dtypes. The K/V type "auto" is that of the weights if K/V can
    have it, else int8, or bfloat16 if the head_dim has no int8 group. Raises ConfigError."""
    if dtype not in WEIGHTS:
        raise ConfigError(f"dtype {dtype!r} is not one of: {', '.join(WEIGHTS)}")
    if kv_dtype == "auto":
        kv_dtype = dtype if dtype in ("float32", "bfloat16") else "int8"
        if kv_dtype == "int8" and not shape.has_int8_kv:
            kv_dtype = "bfloat16"
    if kv_dtype not in KV:
        raise ConfigError(f"kv_dtype {kv_dtype!r} is not one of: auto, {', '.join(KV)}")
    return Precision(dtype, kv_dtype)


def _lengths(
    shape: Shape, prompt: int | None, output: int | None, contexts: Sequence[int] | None
) -> tuple[Load, Sequence[int]]:
    most = shape.max_model_len
    if prompt is None:
        prompt = max(1, min(PROMPT, 3 * most // 4))
    if output is None:
        output = max(1, min(OUTPUT, most // 4))
    _require_counts("prompt", [prompt])
    _require_counts("output", [output])
    if prompt + output > most:
        raise ConfigError(
            f"prompt {prompt} and output {output} are more than the {most} tokens of {shape.name}"
        )
    if contexts is None:
        contexts = [context for context in CONTEXTS if context < most] or [most - 1]
    _require_counts("context", contexts)
    if max(contexts) >= most:
        raise ConfigError(
            f"context {max(contexts)} leaves no room for a token in the {most} of {shape.name}"
        )
    return Load(prompt=prompt, output=output), contexts


def _require_counts(name: str, values: Sequence[int]) -> None:
    for value in values:
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    if not values:
        raise ConfigError(f"{name} must name at least one number")


def _bound(name: str, value: float | None) -> float:
    if value is None:
        return math.inf
    if not value > 0:
        raise ConfigError(f"{name} must be above 0, not {value}")
    return value


def find_machine(name: str, devices: dict[str, Device]) -> Machine:
    """Returns the machine called "NAME", "here" or "NxNAME". Raises ConfigError."""
    matched = _COUNTED.fullmatch(name)
    assert matched is not None or not name, f"{name!r}"
    number, kind = (matched[1], matched[2]) if matched else (None, name)
    if kind == HERE and number is None:
        return Machine(measure_here())
    if kind not in devices:
        raise ConfigError(f"machine {name!r} is neither here nor one of: {', '.join(devices)}")
    count = 1 if number is None else int(number)
    if count < 1 or (count > 1 and devices[kind].peers is None):
        raise ConfigError(f"machine {name!r}: {kind} has no peers in the table of hardware")
    return Machine(devices[kind], count)


def require_divisible(name: str, machine: Machine, shape: Shape) -> None:
    """Raises ConfigError with the machine's name if its devices cannot divide the model's heads."""
    try:
        shape.require_divisible(machine.num_devices)
    except ConfigError as error:
        raise ConfigError(f"machine {name!r}: {error}") from None


def _costs(shape: Shape, precision: Precision, machine: Machine) -> tuple[MachineCost, MachineCost]:
    """Returns the expected cost, and the bound that no software can beat."""
    efficiency = expected(machine.device.kind, precision)
    return (
        MachineCost(shape, precision, machine, efficiency),
        MachineCost(shape, precision, machine, BOUND),
    )


def _write(file: Path, result: dict[str, Any]) -> None:
    try:
        file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"json {file}: {error.strerror or error}") from error
