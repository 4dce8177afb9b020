"""Products at the shapes of the 8B model, in every format, with libraries' products to compare.

A layer's "product" is the kernel alone, on rows that are quantized already. "whole" is the layer as
the engine calls it, with norm, quantization and residual. Several sets of operands take turns, so
that no cache holds a weight from one call to the next.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.gpu.record import Figures, Record, is_device_fault
from bench.gpu.timing import device, num_sets, time_works
from ops import get_backend
from ops.backend import Fusion, LinearOp, Norm

_RIVAL_ROWS = (64, 2048)
_WHOLE_ROWS = (64, 1, 2048)
# The numbers of rows for which tiles are tuned, in the order of their importance.
_TUNED_ROWS = (8192, 64, 1, 16, 2048, 4, 256, 8, 32, 128, 2, 512)
_TUNE_S = 35.0
_WORKERS = 10


class Layer(NamedTuple):
    """A linear layer. num_rows: rows of the weight. adds: the result is added to a residual in
    fp32."""

    name: str
    num_in: int
    num_rows: int
    is_gated: bool = False
    adds: bool = False
    has_norm: bool = False
    is_head: bool = False

    @property
    def num_out(self) -> int:
        return self.num_rows // 2 if self.is_gated else self.num_rows


# Llama-3.1-8B
LAYERS = (
    Layer("qkv", 4096, 6144, has_norm=True),
    Layer("o", 4096, 4096, adds=True),
    Layer("up", 4096, 28672, is_gated=True, has_norm=True),
    Layer("down", 14336, 4096, adds=True),
    Layer("head", 4096, 128256, has_norm=True, is_head=True),
)
SQUARE = Layer("4096x4096", 4096, 4096)
TINY = (Layer("qkv", 64, 96, has_norm=True), Layer("up", 64, 128, is_gated=True, has_norm=True))
TINY_SQUARE = Layer("64x64", 64, 64, adds=True)


def run(record: Record) -> None:
    layers: tuple[Layer, ...] = LAYERS
    square, rows = SQUARE, 8192
    counts: tuple[int, ...] = (64, 16, 4, 1, 2048)
    if record.is_dry:
        layers, square, rows, counts = TINY, TINY_SQUARE, 20, (3,)
    else:
        record.run("tuned", lambda: _tune((*layers, square), min(_TUNE_S, record.left_s() / 2)))
    record.run(f"int8 {rows}x{square.name}", lambda: product(square, rows))
    for count in counts:
        for layer in layers:
            record.run(f"int8 {layer.name} M={count}", partial(product, layer, count))
    for rival, make in RIVALS.items():
        record.run(f"{rival} {rows}x{square.name}", partial(_rival, make, square, rows))
    for kind in ("int8", "fp8", "int4", "bf16"):
        record.run(f"whole {kind} {rows}x{square.name}", partial(whole, kind, square, rows))
        for count, layer in itertools.product(_WHOLE_ROWS if not record.is_dry else counts, layers):
            if not layer.is_head:
                name = f"whole {kind} {layer.name} M={count}"
                record.run(name, partial(whole, kind, layer, count))
    for rival, make in RIVALS.items():
        for count, layer in itertools.product(_RIVAL_ROWS if not record.is_dry else (), layers):
            record.run(f"{rival} {layer.name} M={count}", partial(_rival, make, layer, count))


# ---- our layers


def fusion_of(layer: Layer, kind: str = "int8") -> Fusion:
    norm = None
    if layer.has_norm:
        weight = torch.rand(layer.num_in, device=device()) + 0.5
        norm = Norm("rms", weight.bfloat16() if kind == "bf16" else weight, None, 1e-5)
    return Fusion(norm, "silu" if layer.is_gated else None, layer.is_gated)


def make_op(kind: str, layer: Layer) -> LinearOp:
    """Returns an operator with random weights. kind: int8, fp8, int4 or bf16."""
    backend = get_backend("cuda")
    weight = torch.randn(layer.num_rows, layer.num_in, device=device(), dtype=torch.bfloat16)
    weight *= layer.num_in**-0.5
    fusion = fusion_of(layer, kind)
    if kind == "bf16":
        return backend.pack_linear(weight, None, fusion)
    if kind == "int8":
        assert backend.quantized is not None
        return backend.quantized.int8([weight], None, fusion, is_head=layer.is_head)
    from ops.cuda.linear import Fp8Linear, Int4Linear

    if kind == "fp8":
        return Fp8Linear([weight], None, fusion, device=device())
    group = 64
    codes = torch.randint(0, 16, weight.shape, dtype=torch.uint8, device=device())
    shape = layer.num_rows, layer.num_in // group
    scales = torch.rand(shape, device=device()) * 0.02 + 0.001
    return Int4Linear(codes, scales, None, None, fusion, group=group, device=device())


def make_rows(kind: str, layer: Layer, count: int) -> tuple[Tensor, Tensor | None]:
    """Returns the layer's input and its residual, None if it has none. Between quantized layers
    the residual stream is fp32."""
    stream = torch.bfloat16 if kind == "bf16" else torch.float32
    x = torch.randn(count, layer.num_in, device=device())
    x = x.to(stream) if layer.has_norm else x.bfloat16()
    if not layer.adds:
        return x, None
    return x, torch.randn(count, layer.num_out, device=device()).to(stream)


_WEIGHT_BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.5 + 2 / 64, "bf16": 2.0}


def whole(kind: str, layer: Layer, count: int) -> Figures:
    """Times the layer as the engine calls it. bytes: those of input rows, weights and results."""
    weight_bytes = int(layer.num_rows * layer.num_in * _WEIGHT_BYTES[kind])
    ops = [make_op(kind, layer) for _ in range(num_sets(weight_bytes))]
    x, residual = make_rows(kind, layer, count)
    timing = time_works([partial(op, x, residual) for op in ops])
    moved = weight_bytes + x.numel() * x.element_size()
    moved += count * layer.num_out * (8 if layer.adds else 4 if layer.is_head else 2)
    unit = kind if kind in ("int8", "fp8") else "bf16"
    return timing.figures(bytes=moved, operations=_operations(layer, count), unit=unit)


def product(layer: Layer, count: int) -> Figures:
    """Times the int8 product alone, with the tile that is chosen for it."""
    from ops.cuda.tune import FUSED, LIBRARY
    from ops.triton_kernels.linear import library_linear, scaled_linear
    from ops.triton_kernels.rows import quantize_rows

    op: Any = make_op("int8", layer)
    codes, scales = op.weight.codes, op.weight.scales
    x, residual = make_rows("int8", layer, count)
    rows = quantize_rows(x)
    choice = op.choice(count, layer.adds)
    if choice.implementation == FUSED:  # the same tile, without quantizing the rows
        choice = choice._replace(implementation="triton")
    dtype = torch.float32 if layer.adds or layer.is_head else torch.bfloat16
    out = torch.empty(count, layer.num_out, device=device(), dtype=dtype)
    tile = {} if choice.implementation == LIBRARY else {"tile": choice.tile}
    call: Any = library_linear if choice.implementation == LIBRARY else scaled_linear
    works: list[Callable[[], object]] = []
    for i in range(num_sets(codes.numel())):
        weight = op.weight if i == 0 else op.weight._replace(codes=codes.clone())
        works.append(
            partial(
                call, rows, weight, out, residual, op.fusion.activation,
                is_gated=layer.is_gated, **tile,
            )
        )  # fmt: skip
    timing = time_works(works)
    moved = codes.numel() + 4 * scales.numel() + rows.codes.numel() + 4 * count
    moved += out.numel() * out.element_size() * (2 if layer.adds else 1)
    more = {"choice": f"{choice.implementation} {tuple(choice.tile)}"}
    operations = _operations(layer, count)
    return timing.figures(bytes=moved, operations=operations, unit="int8", **more)


def _operations(layer: Layer, count: int) -> float:
    return 2.0 * count * layer.num_rows * layer.num_in


# ---- tuning


def _jobs(layers: tuple[Layer, ...]) -> Iterator[tuple[Layer, int]]:
    for count in _TUNED_ROWS:
        for layer in layers:
            # Only sampled rows have logits, and only one target needs the square layer.
            if (layer.is_head and count > 256) or (layer.name == SQUARE.name and count != 8192):
                continue
            if count == 8192 and layer.name != SQUARE.name:
                continue
            yield layer, count


def _tune(layers: tuple[Layer, ...], budget_s: float) -> Figures:
    """Tunes the tiles and writes them to the cache, where the engine's sections find them."""
    from ops.cuda import tune

    ops: dict[str, Any] = {layer.name: make_op("int8", layer) for layer in layers}
    jobs = (ops[layer.name].job(count, layer.adds) for layer, count in _jobs(layers))
    tuned = tune.tune(jobs, device(), budget_s=budget_s)
    lines = {f"{s.rows} x {s.num_in} -> {s.num_out}": line for s, line in tuned.items()}
    return {"count": len(tuned), "table": lines}


def warm(record: Record) -> None:
    """Runs every candidate tile once, in several processes, so that tuning finds them compiled."""
    record.run("candidates", lambda: _warm(record))


def _warm(record: Record) -> Figures:
    pairs = list(_jobs((*LAYERS, SQUARE))) if not record.is_dry else [(TINY_SQUARE, 3)]
    ends_s = time.time() + record.left_s() - 10
    done = 0
    failed: dict[str, str] = {}
    workers = 1 if record.is_dry else min(_WORKERS, max(1, (os.cpu_count() or 2) - 4))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        waited = [pool.submit(_run_candidates, layer, count, ends_s) for layer, count in pairs]
        for future in as_completed(waited):
            count, errors = future.result()
            done += count
            failed |= errors
    for name, text in failed.items():
        record.fail(name, text)
    return {"ran": done, "failed": len(failed)}


def _run_candidates(layer: Layer, count: int, ends_s: float) -> tuple[int, dict[str, str]]:
    from ops.cuda import tune

    op: Any = make_op("int8", layer)
    job = op.job(count, layer.adds)
    capability = 90
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        capability = 10 * major + minor
    done, failed = 0, {}
    for choice in tune.candidates(job.shape, capability):
        if time.time() > ends_s:
            break
        try:
            job.run(choice)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            done += 1
        except Exception as error:
            name = f"{layer.name} M={count} {tuple(choice.tile)}"
            failed[name] = f"{type(error).__name__}: {error}"[-600:]
            if is_device_fault(error):
                break
    return done, failed


# ---- the library's products


def _rival(make: Callable[..., Figures], layer: Layer, count: int) -> Figures:
    return make(layer.num_rows, layer.num_in, count)


def _int_mm(num_out: int, num_in: int, count: int) -> Figures:
    sets = num_sets(num_out * num_in)
    x = torch.randint(-127, 128, (count, num_in), dtype=torch.int8, device=device())
    weights = [
        torch.randint(-127, 128, (num_out, num_in), dtype=torch.int8, device=device())
        for _ in range(sets)
    ]
    timing = time_works([partial(torch._int_mm, x, w.t()) for w in weights])
    return _rival_figures(timing, num_out, num_in, count, 1, 4, "int8")


def _scaled_mm(num_out: int, num_in: int, count: int) -> Figures:
    kind = torch.float8_e4m3fn
    x = torch.randn(count, num_in, device=device()).to(kind)
    weights = [
        torch.randn(num_out, num_in, device=device()).to(kind)
        for _ in range(num_sets(num_out * num_in))
    ]
    # Scales are per row and per channel, as in our layers.
    rows = torch.rand(count, 1, device=device())
    channels = torch.rand(1, num_out, device=device())
    timing = time_works(
        [
            partial(torch._scaled_mm, x, w.t(), rows, channels, out_dtype=torch.bfloat16)
            for w in weights
        ]
    )
    return _rival_figures(timing, num_out, num_in, count, 1, 2, "fp8")


def _bf16_linear(num_out: int, num_in: int, count: int) -> Figures:
    x = torch.randn(count, num_in, device=device(), dtype=torch.bfloat16)
    weights = [
        torch.randn(num_out, num_in, device=device(), dtype=torch.bfloat16)
        for _ in range(num_sets(2 * num_out * num_in))
    ]
    timing = time_works([partial(torch.nn.functional.linear, x, w) for w in weights])
    return _rival_figures(timing, num_out, num_in, count, 2, 2, "bf16")


def _rival_figures(
    timing: Any, num_out: int, num_in: int, count: int, in_size: int, out_size: int, unit: str
) -> Figures:
    moved = in_size * (num_out + count) * num_in + out_size * num_out * count
    operations = 2.0 * count * num_out * num_in
    figures: Figures = timing.figures(bytes=moved, operations=operations, unit=unit)
    return figures


RIVALS: dict[str, Callable[..., Figures]] = {
    "torch._int_mm": _int_mm,
    "torch._scaled_mm": _scaled_mm,
    "F.linear bf16": _bf16_linear,
}
