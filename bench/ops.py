"""The CPU kernels against what the machine can do: `serve bench ops [--quick]`.

Every run of a kernel is preceded by a reading of the ceiling that binds it (reading memory, int8 or
bf16 multiply-adds on registers, moving the same bytes) and followed by what torch has for it, so
that the ratios hold although the machine's speed drifts. Operands rotate through more memory than
the caches hold. Reported: medians, the ratio's own included. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import torch.nn.functional as functional
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from bench.ops_linear import FAR, Case, Run, int4_cases, linear_cases, plain_cases
from bench.ops_plain import plain_prefills
from ops import Edges, Norm, native
from ops.heap import keep_freed_memory
from ops.native import Ceilings, Int8Attention, Int8AttentionStep, Int8Linear
from ops.sampling import argmax
from quant.kv import Int8KVFormat

HEADS, KV_HEADS = 32, 8
_READ = 256 << 20
_ROUNDS = 300_000
_PEER_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Reading:
    """rate and limit in G bytes or G operations per second; share: their ratio."""

    name: str
    shape: str
    ceiling: str
    rate: float
    limit: float
    share: float
    target: float
    speedup: float | None


class Limits:
    """Readings of the ceilings."""

    def __init__(self) -> None:
        self._buffer = torch.ones(2 * _READ, dtype=torch.uint8)
        self._half = 0

    def read(self, case: Case) -> float:
        """G/s, now."""
        if case.ceiling == "moved":
            assert case.beside is not None
            return case.work / _seconds(case.beside) / 1e9
        if case.ceiling == "read":
            self._half ^= 1
            part = self._buffer[self._half * _READ :][:_READ]
            return _READ / _seconds(lambda: Ceilings.read(part)) / 1e9
        multiply = Ceilings.multiply_i8 if case.ceiling == "i8" else Ceilings.multiply_bf16
        start = time.perf_counter()
        done = multiply(_ROUNDS)
        return done / (time.perf_counter() - start) / 1e9


def _seconds(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(case: Case, limits: Limits, rounds: int) -> Reading:
    """`rounds` times a ceiling and the kernel, one after the other; the first times a peer too."""
    case.run()
    rates, tops, speedups = [], [], []
    for i in range(rounds):
        tops.append(limits.read(case))
        rates.append(case.work / _seconds(case.run) / 1e9)
        if case.peer is not None and i < _PEER_ROUNDS:
            seconds = _peer_seconds(case.peer, warm=i == 0)
            speedups.append(rates[-1] / (case.peer_work / seconds / 1e9))
    share = statistics.median(rate / top for rate, top in zip(rates, tops, strict=True))
    rate, top = statistics.median(rates), statistics.median(tops)
    speedup = statistics.median(speedups) if speedups else None
    return Reading(case.name, case.shape, case.ceiling, rate, top, share, case.target, speedup)


def _peer_seconds(peer: Run, *, warm: bool) -> float:
    """With torch's own threads, which spin for a while after they are done."""
    torch.set_num_threads(native.num_threads())
    if warm:
        peer()
    seconds = _seconds(peer)
    torch.set_num_threads(1)
    time.sleep(0.02)
    return seconds


def _attend_all(kv: KV, step: Int8AttentionStep, q: Tensor) -> None:
    for op in kv.ops:
        op.attend(step, q)


class KV:
    """Int8 K/V of some sequences of one length, in several layers, filled with random values.

    The kernels know only its address: whoever runs them holds on to it.
    """

    def __init__(self, sequences: int, context: int, dim: int, layers: int) -> None:
        form = Int8KVFormat(KV_HEADS, dim, 64)
        tile_bytes = form.tile_bytes * layers
        range_bytes = -(-context // 16) * tile_bytes
        self.memory = torch.zeros(sequences * range_bytes + 64, dtype=torch.uint8)
        self.address = self.memory.data_ptr() + -self.memory.data_ptr() % 64
        self.tile_bytes, self.context = tile_bytes, context
        self.starts = [i * range_bytes for i in range(sequences)]
        self.ops = [
            Int8Attention(
                offset_bytes=i * form.tile_bytes,
                num_heads=HEADS,
                num_kv_heads=KV_HEADS,
                head_dim=dim,
                group=form.group,
                scale=dim**-0.5,
            )
            for i in range(layers)
        ]
        self.bytes_read = form.token_bytes * context * sequences * layers
        k = torch.randn(sequences * context, KV_HEADS, dim)
        whole = self.step(context)
        for op in self.ops:
            op.append(whole, k, k.roll(1, 0), None)

    def step(self, rows: int) -> Int8AttentionStep:
        """The last `rows` positions of each sequence."""
        n = len(self.starts)
        return Int8AttentionStep(
            self.address, self.tile_bytes, self.starts, [rows] * n, [self.context] * n
        )


def decode_cases(quick: bool) -> Iterator[Case]:
    shapes = [(d, b, n) for d in (64, 128) for b in (1, 8, 32) for n in (512, 4096)]
    for dim, batch, context in [(64, 1, 512)] if quick else shapes:
        layer_bytes = Int8KVFormat(KV_HEADS, dim, 64).token_bytes * context * batch
        kv = KV(batch, context, dim, 1 if quick else max(1, min(32, FAR // layer_bytes)))
        step, q = kv.step(1), torch.randn(batch, HEADS, dim)
        keys = torch.randn(batch, KV_HEADS, context, dim).bfloat16()
        query = q.bfloat16()[:, :, None]
        yield Case(
            "decode attention",
            f"B={batch} L={context} {HEADS}/{KV_HEADS} D={dim}",
            "read",
            kv.bytes_read,
            0.8,
            partial(_attend_all, kv, step, q),
            peer=partial(
                functional.scaled_dot_product_attention, query, keys, keys, enable_gqa=True
            ),
            peer_work=layer_bytes,
        )


def prefill_cases(quick: bool) -> Iterator[Case]:
    """Only the unmasked part counts as work."""
    shapes = [(d, past) for d in (64, 128) for past in (0, 4096)]
    for dim, past in [(64, 0)] if quick else shapes:
        rows = 64 if quick else 512
        kv = KV(1, past + rows, dim, 1)
        step, q = kv.step(rows), torch.randn(rows, HEADS, dim)
        yield Case(
            "prefill attention",
            f"{rows} on {past} {HEADS}/{KV_HEADS} D={dim}",
            "bf16",
            4 * HEADS * dim * (rows * past + rows * (rows + 1) // 2),
            0.5,
            partial(_attend_all, kv, step, q),
        )


def plain_prefill_cases(quick: bool) -> Iterator[Case]:
    """Only the unmasked part counts as work, for the peer too."""
    for shape, work, run, peer in plain_prefills(quick, HEADS, KV_HEADS):
        yield Case(
            "bf16 prefill attention", shape, "bf16", work, 0.5, run, peer=peer, peer_work=work
        )


def fused_cases(quick: bool) -> Iterator[Case]:
    """Against moving as many bytes as they must read and write, 1.3 times that at most.

    Like the kernels they stand between, they read what the caches do not hold.
    """
    hidden, inner, vocab, dim = 2048, 8192, 128_256, 64
    normed = Int8Linear(
        torch.randn(32, hidden), None, Edges(Norm("rms", torch.ones(hidden), None, 1e-5))
    )
    plain = Int8Linear(torch.randn(32, inner), None)
    far = 8 << 20 if quick else FAR
    for rows in (1, 32) if quick else (1, 8, 32, 512):
        x = torch.ones(far // (4 * rows * hidden), rows, hidden)
        yield _moving("norm + quantize", rows, 5 * hidden, x, normed.only_quantize)
        h = torch.ones(far // (2 * rows * inner), rows, inner, dtype=torch.bfloat16)
        yield _moving("quantize", rows, 3 * inner, h, plain.only_quantize)
        yield _append_case(rows, dim, far)
        logits = torch.zeros(max(1, far // (4 * rows * vocab)), rows, vocab)
        yield _moving("greedy sampling", rows, 4 * vocab, logits, argmax, is_read=True)


def _append_case(rows: int, dim: int, far: int) -> Case:
    """Decode rows of as many sequences, or one prompt of 512; layers as far apart as in a model."""
    token_bytes = 2 * KV_HEADS * dim * 4 + Int8KVFormat(KV_HEADS, dim, 64).token_bytes
    kv = KV(rows, 32, dim, 16) if rows < 512 else KV(1, rows, dim, 16)
    step = kv.step(1 if rows < 512 else rows)
    angle = torch.randn(rows, dim // 2)
    rotation = (angle.cos(), angle.sin())
    k = torch.ones(max(16, far // (rows * token_bytes)), 2, rows, KV_HEADS, dim)
    pairs = list(zip(itertools.cycle(kv.ops), *k.unbind(1), strict=False))
    return replace(
        _moving("RoPE + append", rows, token_bytes, k, lambda _: None),
        run=partial(_append_all, kv, step, pairs, rotation),
    )


def _append_all(
    kv: KV,
    step: Int8AttentionStep,
    pairs: list[tuple[Int8Attention, Tensor, Tensor]],
    rotation: tuple[Tensor, Tensor],
) -> None:
    """kv is only held on to: the steps know addresses."""
    for op, k, v in pairs:
        op.append(step, k, v, rotation)


def _moving(
    name: str,
    rows: int,
    row_bytes: int,
    operands: Tensor,
    run: Callable[[Tensor], object],
    *,
    is_read: bool = False,
) -> Case:
    """run on each of the operands in turn, beside a copy (or only the reading) of its bytes."""
    parts = list(operands)
    half = rows * row_bytes // (1 if is_read else 2)
    source = [part.view(-1).view(torch.uint8)[:half] for part in parts]
    other = torch.zeros(half, dtype=torch.uint8)

    def beside() -> None:
        for part in source:
            if is_read:
                Ceilings.read(part)
            else:
                Ceilings.copy(other, part)

    work = float(rows * row_bytes * len(parts))
    return Case(
        name, f"M={rows}", "moved", work, 1 / 1.3, lambda: [run(p) for p in parts], beside=beside
    )


def cases(quick: bool) -> Iterator[Case]:
    makers = (linear_cases, plain_cases, int4_cases, decode_cases)
    for make in (*makers, prefill_cases, plain_prefill_cases, fused_cases):
        for case in make(quick):
            # without an instruction for bf16 the other ceiling has to do
            is_bound = case.ceiling != "bf16" or Ceilings.multiply_bf16(1) > 0
            yield case if is_bound else replace(case, ceiling="i8")


def report(readings: list[Reading], console: Console) -> None:
    table = Table("kernel", "shape", "rate", "ceiling", "share", "target", "to torch")
    units = {"read": "GB/s", "moved": "GB/s", "i8": "GOP/s", "bf16": "GFLOP/s"}
    for r in readings:
        colour = "green" if r.share >= r.target else "yellow"
        table.add_row(
            r.name,
            r.shape,
            f"{r.rate:,.1f} {units[r.ceiling]}",
            f"{r.limit:,.1f} {r.ceiling}",
            f"[{colour}]{r.share:.0%}[/{colour}]",
            f"{r.target:.0%}",
            "" if r.speedup is None else f"{r.speedup:.3g}x",
        )
    console.print(table)


def run_and_report(*, quick: bool, only: str = "") -> None:
    """Measure the cases whose name holds `only`, print the table and the JSON line."""
    keep_freed_memory()  # as the engine does: results are not paid for with page faults
    torch.set_num_threads(1)  # the other team of threads stays out of the way
    console = Console()
    console.width = max(console.width, 110)
    head = {
        "isa": native.instruction_set(),
        "threads": native.num_threads(),
        "machine": platform.machine(),
        "torch": torch.__version__,
    }
    console.print(" ".join(f"{key} {value}" for key, value in head.items()), highlight=False)
    limits, rounds, readings = Limits(), 3 if quick else 11, []
    for case in track(cases(quick), "measuring", console=Console(stderr=True), transient=True):
        if only in case.name:
            readings.append(measure(case, limits, rounds))
    report(readings, console)
    print(json.dumps({**head, "readings": [asdict(r) for r in readings]}))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ops", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few small shapes")
    parser.add_argument("--only", default="", help="kernels whose name holds this")
    parser.add_argument(
        "--isa", choices=native.library().instruction_sets(), help="other kernels than the best"
    )
    args = parser.parse_args()
    if args.isa:
        native.library().choose_instruction_set(args.isa)
    run_and_report(quick=args.quick, only=args.only)


if __name__ == "__main__":
    main()
