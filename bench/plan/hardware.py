"""The peaks of devices, from the packaged table of data sheets, a user's file of the same form, or
measured ceilings of this machine."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve.errors import ConfigError, reason
from serve.machine import available_memory
from serve.regular_file import open_regular

if TYPE_CHECKING:
    from bench.common.ceilings import Ceiling

HERE = "here"  # the name of this machine
READ_BYTES = 256 << 20
KINDS = ("gpu", "cpu")
BACKENDS = ("cpu", "cuda", "none")
ARITHMETIC = ("fp32", "bf16", "fp8", "int8", "int4")
_SIZES = {"memory_gb": "memory_bytes", "bandwidth_gb_s": "bytes_per_s"}
_LINKS = ("peers", "network")
_OTHERS = {"cache_mb", "usd_per_h", "watts", "backend", "measured"}


@dataclass(frozen=True, slots=True)
class Link:
    """A device's link. bytes_per_s is the rate in each direction, seconds the time that every
    exchange adds."""

    bytes_per_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device with its dense peaks. operations has the operations per second by the type of the
    factors; multiply and add are two operations.

    cache_bytes is the size of the last cache, which need not be read from memory in each step.
    peers is the link to devices of the same kind in the machine, network the link to other
    machines; None means that there is none or it is not known. dollars_per_h and watts are None if
    they are not known. backend is one of BACKENDS, the back end of this software that drives the
    device. is_measured means that the peaks were measured and are not those of a data sheet.
    """

    name: str
    kind: str
    memory_bytes: float
    bytes_per_s: float
    operations: Mapping[str, float] = field(hash=False)
    cache_bytes: float = 0.0
    peers: Link | None = None
    network: Link | None = None
    dollars_per_h: float | None = None
    watts: float | None = None
    backend: str = "cpu"
    is_measured: bool = False

    def peak(self, *types: str) -> float | None:
        """Returns the peak of the first of these types that the device multiplies; None if none."""
        return next((self.operations[name] for name in types if name in self.operations), None)


def load_devices(file: Path | None = None) -> dict[str, Device]:
    """Returns the packaged devices and those of a user's file by name. A section of the file with
    the name of a packaged device overrides the keys that it has. Raises ConfigError that names
    file, section and key."""
    packaged = files("bench.plan").joinpath("hardware.toml").read_text(encoding="utf-8")
    sections: dict[str, dict[str, Any]] = tomllib.loads(packaged)
    if file is not None:
        for name, section in read_toml(file, "hardware").items():
            if not isinstance(section, dict):
                raise ConfigError(f"hardware {file}: {name} must be a section [{name}]")
            sections[name] = sections.get(name, {}) | section
    source = "hardware.toml" if file is None else str(file)
    return {name: _device(name, section, source) for name, section in sections.items()}


def read_toml(file: Path, setting: str) -> dict[str, Any]:
    """Returns the content of a TOML file. Raises ConfigError with the setting, the file and, for
    invalid TOML, the line."""
    try:
        with open_regular(file) as opened:
            return tomllib.loads(opened.read().decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{setting} {file}: {reason(error)}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting} {file}: {error}") from error


def _device(name: str, section: dict[str, Any], source: str) -> Device:
    where = f"hardware {source}: [{name}]"
    known = {"kind", *_SIZES, *_LINKS, *_OTHERS, *(f"{kind}_tops" for kind in ARITHMETIC)}
    unknown = sorted(section.keys() - known)
    if unknown:
        raise ConfigError(f"{where} has an unknown key {unknown[0]}; known: {sorted(known)}")
    if section.get("kind") not in KINDS:
        raise ConfigError(f"{where} kind must be one of {', '.join(KINDS)}")
    backend = section.get("backend", "cuda" if section["kind"] == "gpu" else "cpu")
    if backend not in BACKENDS:
        raise ConfigError(f"{where} backend must be one of {', '.join(BACKENDS)}")
    if not isinstance(is_measured := section.get("measured", False), bool):
        raise ConfigError(f"{where} measured must be true or false, not {is_measured!r}")

    def number(key: str, *, needed: bool = False) -> float | None:
        value = section.get(key)
        if value is None and not needed:
            return None
        return _number(value, f"{where} {key}")

    operations = {
        kind: 1e12 * value for kind in ARITHMETIC if (value := number(f"{kind}_tops")) is not None
    }
    if not {"fp32", "bf16"} & operations.keys():
        raise ConfigError(f"{where} needs fp32_tops or bf16_tops")
    links = {key: _link(section[key], f"{where} {key}") for key in _LINKS if key in section}
    return Device(
        name=name,
        kind=section["kind"],
        memory_bytes=1e9 * (number("memory_gb", needed=True) or 0.0),
        bytes_per_s=1e9 * (number("bandwidth_gb_s", needed=True) or 0.0),
        operations=operations,
        cache_bytes=1e6 * (number("cache_mb") or 0.0),
        dollars_per_h=number("usd_per_h"),
        watts=number("watts"),
        backend=backend,
        is_measured=is_measured,
        **links,
    )


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(f"{where} must be a number above 0, not {value!r}")
    return float(value)


def _link(value: object, where: str) -> Link:
    if not isinstance(value, dict) or value.keys() != {"gb_s", "us"}:
        raise ConfigError(f"{where} must be {{ gb_s = ..., us = ... }}, not {value!r}")
    return Link(1e9 * _number(value["gb_s"], where), _number(value["us"], where) / 1e6)


def measure_here() -> Device:
    """Measures this machine's ceilings, which takes a second and imports torch. Raises ConfigError
    without the native kernels, which measure the instructions that they use."""
    import torch

    from bench.common.ceilings import Ceiling
    from ops.cpu import native_library

    if not native_library.is_available():
        raise ConfigError("machine here: the native kernels are not built")
    return device_of(Ceiling.now(torch.ones(READ_BYTES, dtype=torch.uint8)))


def device_of(ceiling: Ceiling) -> Device:
    """Returns this machine with the measured ceilings and the available memory.

    The fp32 rate is taken as half of the bf16 rate, or as a quarter of the int8 rate if the
    processor has no bf16 instruction.
    """
    operations = {"int8": ceiling.i8, "fp32": ceiling.bf16 / 2 or ceiling.i8 / 4}
    if ceiling.bf16:
        operations["bf16"] = ceiling.bf16
    return Device(
        name=HERE,
        kind="cpu",
        memory_bytes=available_memory(),
        bytes_per_s=ceiling.read,
        operations=operations,
        cache_bytes=_cache_bytes(),
        is_measured=True,
    )


def _cache_bytes() -> float:
    """Returns the size of the last cache level; 0 if the system does not report it."""
    try:
        return float(max(0, os.sysconf("SC_LEVEL3_CACHE_SIZE")))
    except (OSError, ValueError):
        return 0.0
