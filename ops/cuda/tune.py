"""The choice of implementation and tile for a product, by measurement or by rule.

`tune` stores measurements in a JSON file per device and versions, in the user's cache. A file that
cannot be read is ignored, and so is every line that is not a current candidate.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from ops.kv_tiles import architecture
from ops.triton_kernels.linear import MAX_SPLIT_SUMS, Tile
from ops.triton_kernels.small_batch import MAX_ROWS

logger = logging.getLogger(__name__)

TRITON, LIBRARY, FUSED = "triton", "library", "fused"
FORMAT = 1


class Shape(NamedTuple):
    """The shape of a matrix product. kernel: int8, int4 or fp8; rows: the most rows it is for, a
    power of two."""

    kernel: str
    rows: int
    num_out: int
    num_in: int
    adds: bool = False
    """whether a residual is added, in fp32"""


class Choice(NamedTuple):
    """An implementation with its tile.

    FUSED has norm and rounding in the product's kernel. LIBRARY is torch's product, which has no
    tile, followed by a kernel.
    """

    implementation: str
    tile: Tile


def bucket(num_rows: int) -> int:
    """Returns Shape.rows for num_rows rows."""
    return int(triton.next_power_of_2(max(1, num_rows)))


def candidates(shape: Shape, capability: int) -> list[Choice]:
    """Returns the choices for a shape; the first is the one by rule.

    capability: 90, 89 or 80, from ops.kv_tiles.architecture.
    """
    tiles = (_int4_tiles if shape.kernel == "int4" else _int8_tiles)(shape, capability)
    if shape.kernel != "int8":  # the order of floating-point sums must not change
        tiles = list(dict.fromkeys(tile._replace(split_k=1) for tile in tiles))
    if shape.kernel == "fp8" and capability >= 90:  # below 64 channels Triton multiplies in fp16
        tiles = [tile for tile in tiles if tile.n >= 64]
    found = [Choice(TRITON, tile) for tile in tiles]
    has_library = shape.kernel == "int8" or (shape.kernel == "fp8" and capability >= 90)
    if has_library and shape.rows > 16 and shape.num_out % 16 == 0 and shape.num_in % 16 == 0:
        found.append(Choice(LIBRARY, tiles[0]))
    if shape.kernel == "int8" and shape.rows <= MAX_ROWS:
        found = _with_fused(shape, found)
    return found


def _with_fused(shape: Shape, found: list[Choice]) -> list[Choice]:
    """Adds fused choices if ops.triton_kernels.small_batch's estimate allows a gain.

    They are only taken if measured, never by rule.
    """
    fused = [
        Choice(FUSED, tile)
        for _, tile in found
        if tile.num_warps >= 4 and tile.n >= 16 * shape.rows
    ]
    if shape.rows * shape.num_in > 16384:
        return found
    return found + fused


def _fits(shape: Shape, tile: Tile) -> bool:
    """Returns whether the split sums fit their scratch memory, which has a fixed size."""
    tiles = triton.cdiv(shape.rows, tile.m) * triton.cdiv(shape.num_out, tile.n)
    return tile.split_k == 1 or tiles * tile.m * tile.n <= MAX_SPLIT_SUMS


# The number of programs that keep an H200 busy; with fewer, K is split.
_FULL = 132


def _split(shape: Shape, tile: Tile) -> Tile:
    """Returns the tile with K split into enough programs, each with at least four blocks."""
    tiles = triton.cdiv(shape.rows, tile.m) * triton.cdiv(shape.num_out, tile.n)
    parts = min(_FULL * 3 // 2 // tiles, triton.cdiv(shape.num_in, tile.k) // 4, 8)
    split = tile._replace(split_k=max(1, parts))
    return split if _fits(shape, split) else tile


def _int8_tiles(shape: Shape, capability: int) -> list[Tile]:
    if shape.rows <= 16:
        return _streams(shape, capability)
    if capability < 90:
        tiles = [
            Tile(64 if shape.rows <= 64 else 128, 128, 64, 8, 4 if capability == 80 else 3),
            Tile(64, 64, 128, 4, 3),
        ]
        return [_split(shape, tile) for tile in tiles]
    if shape.rows == 32:
        tiles = [
            Tile(32, 128, 256, 4, 4, swap=True),
            Tile(32, 64, 256, 4, 5, swap=True),
            Tile(32, 128, 128, 4, 6, swap=True),
        ]
    elif shape.rows == 64:
        tiles = [
            Tile(64, 128, 128, 4, 5),
            Tile(64, 64, 256, 4, 4),
            Tile(64, 128, 256, 4, 3),
            Tile(64, 256, 128, 8, 4),
        ]
    else:
        # of two programs with square tiles on an SM, one stores while the other multiplies
        square = [Tile(128, 128, 128, 8, 3), Tile(128, 128, 128, 8, 5), Tile(128, 128, 128, 4, 3)]
        wide = [Tile(128, 256, 128, 8, 4), Tile(128, 256, 128, 8, 3, group_m=16)]
        fills = triton.cdiv(shape.rows, 128) * triton.cdiv(shape.num_out, 256) >= _FULL
        tiles = wide + square if fills else square + wide
    return [_split(shape, tile) for tile in tiles]


def _streams(shape: Shape, capability: int) -> list[Tile]:
    """Returns tiles of n x k bytes of weights for up to 16 rows; wide ones first for large N."""
    m, deep = (8 if shape.rows <= 8 else 16), capability != 89
    tiles = [
        Tile(m, 32, 512, 4, 5 if deep else 4, swap=True),
        Tile(m, 16, 512, 2, 5, swap=True),
        Tile(m, 16, 1024, 4, 4 if deep else 3, swap=True),
        Tile(m, 32, 256, 4, 6, swap=True),
        Tile(m, 64, 256, 4, 5 if deep else 4, swap=True),
        Tile(m, 64, 512, 4, 4 if deep else 2, swap=True),
    ]
    if triton.cdiv(shape.num_out, 32) < _FULL * 3 // 4:
        tiles[:2] = tiles[1::-1]
    return [_split(shape, tile) for tile in tiles]


def _int4_tiles(shape: Shape, capability: int) -> list[Tile]:
    """Returns tiles for 4-bit weights; k is the bytes of packed codes per iteration."""
    m = min(max(shape.rows, 8), 128)
    if m <= 16:
        deep = 4 if capability != 89 else 3
        found = [(32, 512, 2, deep), (16, 512, 1, 4), (32, 256, 2, 5), (64, 256, 4, deep)]
    elif m == 32:
        found = [(64, 256, 4, 3), (64, 128, 4, 4), (128, 128, 4, 3)]
    elif m == 64:
        found = [(64, 128, 4, 4), (128, 64, 4, 4)]
    else:
        found = [(128, 64, 8, 4), (64, 64, 4, 4)]
    return [Tile(m, n, k, warps, stages, swap=True) for n, k, warps, stages in found]


class Table:
    """Measured choices of one device, by shape."""

    def __init__(self, path: Path, about: dict[str, str]) -> None:
        """about: the device and versions for which the measurements are valid."""
        self.path, self.about = path, about
        self._lines: dict[str, object] = {}
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT or content["about"] != about:
                raise ValueError("it is for another device or version")
            self._lines = dict(content["choices"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("measured choices in %s are not used: %r", path, error)

    def get(self, shape: Shape, among: Sequence[Choice]) -> Choice | None:
        line = self._lines.get(_key(shape))
        for choice in among:
            if line == [choice.implementation, list(choice.tile)]:
                return choice
        if line is not None:
            logger.warning("%s: %r is no choice for %s", self.path, line, _key(shape))
        return None

    def has(self, shape: Shape) -> bool:
        """Returns whether the shape was measured."""
        return _key(shape) in self._lines

    def put(self, shape: Shape, choice: Choice) -> None:
        self._lines[_key(shape)] = [choice.implementation, list(choice.tile)]

    def save(self) -> None:
        """Writes the file atomically. OSError if it cannot be written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, "about": self.about, "choices": self._lines}
        handle, name = tempfile.mkstemp(dir=self.path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
            os.replace(name, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


def _key(shape: Shape) -> str:
    adds = " adds" if shape.adds else ""
    return f"{shape.kernel} {shape.rows} x {shape.num_in} -> {shape.num_out}{adds}"


def cache_folder() -> Path:
    """Returns this program's folder in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mergestep"


_tables: dict[torch.device, Table] = {}


def table(device: torch.device) -> Table:
    """Returns the device's table, which is read once."""
    if device not in _tables:
        about = {
            "device": torch.cuda.get_device_name(device),
            "torch": str(torch.__version__),
            "triton": str(triton.__version__),
        }
        name = re.sub(r"[^A-Za-z0-9.+]+", "-", "-".join(about.values()))
        _tables[device] = Table(cache_folder() / f"tuned-{name}.json", about)
    return _tables[device]


def choose(shape: Shape, device: torch.device) -> Choice:
    """Returns the fastest measured choice, or the one by rule."""
    if device.type != "cuda":
        return candidates(shape, 90)[0]
    among = candidates(shape, architecture(device))
    return table(device).get(shape, among) or among[0]


class Job(NamedTuple):
    """A product to measure. run computes it with a choice; the result is the same for each choice.
    is_exact: all bits of the results must agree."""

    shape: Shape
    run: Callable[[Choice], torch.Tensor]
    is_exact: bool


def tune(jobs: Iterable[Job], device: torch.device, *, budget_s: float = 120.0) -> dict[Shape, str]:
    """Measures every candidate of the jobs and stores the best in the table and its file.

    It stops at the first job that would begin after budget_s. Returns a line about each job.
    RuntimeError without a device. Layers that have already run keep their earlier choices.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        raise RuntimeError("there is no CUDA device to measure on")
    end, lines = time.monotonic() + budget_s, {}
    # Data left in the L2 cache by the previous run would make every candidate look faster.
    flush = torch.empty(256 << 20, dtype=torch.int8, device=device)
    for job in jobs:
        if time.monotonic() > end:
            break
        among = candidates(job.shape, architecture(device))
        times = _times(job, among, flush)
        if times:
            best = min(times, key=times.__getitem__)
            table(device).put(job.shape, best)
            lines[job.shape] = f"{best}: {times[best]:.4f} ms, by rule {times.get(among[0], 0):.4f}"
            logger.info("%s: %s", _key(job.shape), lines[job.shape])
    table(device).save()
    return lines


def _times(job: Job, among: Sequence[Choice], flush: torch.Tensor) -> dict[Choice, float]:
    """Returns the ms of each candidate that runs and agrees with the first one."""
    times: dict[Choice, float] = {}
    first: torch.Tensor | None = None
    for choice in among:
        try:
            found = job.run(choice)
            torch.cuda.synchronize()
        except (RuntimeError, triton.runtime.errors.TritonError) as error:
            logger.warning("%s with %s: %s", _key(job.shape), choice, str(error)[:500])
            continue
        first = found if first is None else first
        if not agrees(found, first, is_exact=job.is_exact):
            logger.error("%s with %s: another result", _key(job.shape), choice)
            continue
        times[choice] = measure(lambda: job.run(choice), flush)  # noqa: B023
    return times


def agrees(found: torch.Tensor, want: torch.Tensor, *, is_exact: bool) -> bool:
    """Returns whether results are equal in all bits, or within 1 % of the largest."""
    if is_exact:
        return torch.equal(found, want)
    far = (found.float() - want.float()).abs().max()
    return bool(far <= 0.01 * want.float().abs().max())


def measure(run: Callable[[], object], flush: torch.Tensor, repeats: int = 9) -> float:
    """Returns the median time in ms with a cold L2 cache, in a graph like the engine's steps."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return sorted(times)[repeats // 2]
