"""The device's ceilings, measured on random data in the same run as all other figures."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench.gpu.record import Figures, Record
from bench.gpu.timing import device, make_events, time_works

_QUERIED = "clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw,power.limit,pstate"
READ_BLOCK = 8192  # values that a program of the kernel reads at once
_PACKAGES = ("torch", "triton", "transformers", "flashinfer-python", "flash-attn", "cuda-bindings")


@triton.jit
def read_kernel(x_at, out_at, num_blocks, BLOCK: tl.constexpr):
    """Writes the xor of the blocks that each program reads. x: num_blocks * BLOCK int32, fewer than
    2^31 values; out: [programs, BLOCK]."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        total = total ^ tl.load(x_at + block * BLOCK + lanes)
    tl.store(out_at + tl.program_id(0) * BLOCK + lanes, total)


def read_all(x: Tensor, out: Tensor) -> None:
    """Reads x: int32, a multiple of READ_BLOCK values. out: [programs, READ_BLOCK] int32."""
    read_kernel[(out.shape[0],)](x, out, x.numel() // READ_BLOCK, BLOCK=READ_BLOCK, num_warps=8)


@triton.jit
def multiply_kernel(
    a_at, b_at, out_at, repeats,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, IS_INT8: tl.constexpr,
):  # fmt: skip
    """Adds the product of the same two tiles `repeats` times. a: [M, K], b: [N, K]."""
    rows, cols, depth = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_at + rows[:, None] * K + depth[None, :])
    b = tl.load(b_at + cols[None, :] * K + depth[:, None])
    if IS_INT8:
        total = tl.zeros((M, N), tl.int32)
        for _ in range(repeats):
            total = tl.dot(a, b, total, out_dtype=tl.int32)
    else:
        total = tl.zeros((M, N), tl.float32)
        for _ in range(repeats):
            total = tl.dot(a, b, total)
    at = tl.program_id(0).to(tl.int64) * M * N
    tl.store(out_at + at + rows[:, None] * N + cols[None, :], total)


def multiply(a: Tensor, b: Tensor, out: Tensor, repeats: int, num_warps: int = 8) -> int:
    """Multiplies a: [M, K] by b: [N, K] in every program. out: [programs, M, N], the results.
    Returns the number of operations."""
    (rows, depth), cols = a.shape, b.shape[0]
    multiply_kernel[(out.shape[0],)](
        a, b, out, repeats,
        M=rows, N=cols, K=depth, IS_INT8=a.dtype == torch.int8, num_warps=num_warps,
    )  # fmt: skip
    return 2 * rows * cols * depth * repeats * out.shape[0]


def environment(record: Record) -> None:
    record.run("device", partial(_device, record.is_dry))
    record.run("versions", _versions)
    if torch.cuda.is_available():
        record.run("clocks", clocks)


def _device(is_dry: bool) -> Figures:
    if is_dry:
        return {"name": platform.machine()}
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device that torch can use; try --dry-run")
    found = torch.cuda.get_device_properties(0)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory_gib": round(found.total_memory / 2**30, 1),
        "l2_mib": round(getattr(found, "L2_cache_size", 0) / 2**20, 1),
    }


def _versions() -> Figures:
    found: Figures = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    found["processors"] = os.cpu_count() or 0
    return found


def clocks() -> Figures:
    """Returns the device's clocks, temperature and power, and changes none of them."""
    command = ["nvidia-smi", f"--query-gpu={_QUERIED},driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
    names = [*_QUERIED.split(","), "driver"]
    return dict(zip((name.replace(".", "_") for name in names), values, strict=True))


def run(record: Record) -> None:
    size = 1 << 16 if record.is_dry else 1 << 31
    width = 64 if record.is_dry else 8192
    record.run("copy", partial(_copy, size))
    record.run("read", partial(_read, size))
    record.run("bf16", partial(_best, _bf16_probes(width)))
    record.run("int8", partial(_best, _int8_probes(width, record.is_dry)))
    record.run("fp8", partial(_best, _fp8_probes(width, record.is_dry)))
    record.run("launch", _launches)
    if torch.cuda.is_available():
        record.run("clocks after", clocks)


def _random_bytes(count: int) -> torch.Tensor:
    made = torch.empty(count // 4, dtype=torch.int32, device=device())
    return made.random_().view(torch.uint8)


def _copy(size: int) -> Figures:
    """Measures copying. The rate counts the bytes read and the bytes written."""
    source = _random_bytes(size)
    target = torch.empty_like(source)
    timing = time_works([lambda: target.copy_(source)])
    return {"rate": 2 * size / timing.seconds, **timing.figures()}


def _read(size: int) -> Figures:
    """Measures reading with several numbers of programs and returns the best figures."""
    values = _random_bytes(size).view(torch.int32)
    counts = (132, 264, 528, 1056) if torch.cuda.is_available() else (2,)
    best: Figures = {"rate": 0.0}
    for count in counts:
        out = torch.empty(count, READ_BLOCK, dtype=torch.int32, device=device())
        timing = time_works([partial(read_all, values, out)])
        rate = size / timing.seconds
        if rate > best["rate"]:
            best = {"rate": rate, "programs": count, **timing.figures()}
    return best


Probe = Callable[[], Figures]


def _best(probes: dict[str, Probe]) -> Figures:
    """Returns the fastest probe's figures and the errors of those that fail; raises if all fail."""
    rates: dict[str, float] = {}
    errors: dict[str, str] = {}
    error: Exception | None = None
    for name, probe in probes.items():
        try:
            rates[name] = probe()["rate"]
        except Exception as raised:  # not every device has every product
            error = raised
            errors[f"{name}_error"] = f"{type(raised).__name__}: {raised}"[:200]
    if error is not None and not rates:
        raise error
    best = max(rates, key=rates.__getitem__)
    each = {f"{name} Top/s": round(rate / 1e12, 3) for name, rate in rates.items()}
    return {"rate": rates[best], "probe": best, **each, **errors}


def _rate(operations: float, work: Callable[[], object]) -> Figures:
    return {"rate": operations / time_works([work]).seconds}


def _matrix(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.int8:
        return torch.randint(-127, 128, (rows, cols), dtype=dtype, device=device())
    return torch.randn(rows, cols, device=device()).to(dtype)


def _bf16_probes(width: int) -> dict[str, Probe]:
    def library() -> Figures:
        a, b = (_matrix(width, width, torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        return _rate(2.0 * width**3, lambda: torch.mm(a, b.t(), out=out))

    return {"torch.mm": library}


def _int8_probes(width: int, is_dry: bool) -> dict[str, Probe]:
    def library() -> Figures:
        a, b = (_matrix(width, width, torch.int8) for _ in range(2))
        return _rate(2.0 * width**3, lambda: torch._int_mm(a, b.t()))

    return {"torch._int_mm": library, **_loops(torch.int8, torch.int32, is_dry)}


def _fp8_probes(width: int, is_dry: bool) -> dict[str, Probe]:
    def library() -> Figures:
        a, b = (_matrix(width, width, torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=device())
        options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        return _rate(2.0 * width**3, lambda: torch._scaled_mm(a, b.t(), one, one, **options))

    return {"torch._scaled_mm": library, **_loops(torch.float8_e4m3fn, torch.float32, is_dry)}


def _loops(dtype: torch.dtype, sums: torch.dtype, is_dry: bool) -> dict[str, Probe]:
    """Returns probes of tiles that stay in registers, for several shapes."""

    def loop(rows: int, cols: int, depth: int, num_warps: int) -> Figures:
        a, b = _matrix(rows, depth, dtype), _matrix(cols, depth, dtype)
        programs, repeats = (1, 2) if is_dry else (132 * 8, 2000)
        out = torch.empty(programs, rows, cols, dtype=sums, device=device())
        operations = 2.0 * rows * cols * depth * repeats * programs
        return _rate(operations, partial(multiply, a, b, out, repeats, num_warps))

    if is_dry:
        return {"loop": partial(loop, 16, 16, 32, 4)}
    shapes = ((128, 256, 128, 8), (128, 128, 128, 4), (64, 256, 128, 4))
    return {f"loop {m}x{n}x{k}": partial(loop, m, n, k, warps) for m, n, k, warps in shapes}


def _launches() -> Figures:
    """Measures a tiny kernel in a graph of many kernels, and in a graph of its own."""
    x = torch.zeros(32, device=device())
    figures: Figures = {"in_a_graph_us": 1e6 * time_works([lambda: x.add_(1.0)]).seconds}
    if not torch.cuda.is_available():
        return figures
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1.0)
    begin, end = make_events(2)
    for count in (100, 2000):  # the first warms up
        begin.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        figures["replay_us"] = 1e3 * begin.elapsed_time(end) / count
    return figures
