"""4-bit linear layers against reading their bytes: `python -m bench.ops4 [--quick]`.

Measured like bench/ops.py: weights out of cache, every run beside a reading of the ceiling. The
bytes are those of the packed weights, scales and zero points included.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict

import torch
from rich.console import Console

from bench.ops import Case, Limits, measure, report
from ops import native
from ops.native import Int4Linear

_FAR = 400 << 20  # bytes of weights that no cache holds
NUM_IN, NUM_OUT, GROUP = 2048, 8192, 64
KINDS = ("int4", "int4 zeros", "nf4")


def layers(kind: str, quick: bool) -> list[Int4Linear]:
    """Random codes, as many layers as fill _FAR."""
    shape = (NUM_OUT, NUM_IN // GROUP)
    codes = torch.randint(0, 16, (NUM_OUT, NUM_IN), dtype=torch.uint8)
    scales = torch.rand(shape) + 0.1
    zeros = torch.randint(0, 16, shape, dtype=torch.uint8) if kind == "int4 zeros" else None
    count = 2 if quick else _FAR // (NUM_IN * NUM_OUT // 2)
    return [
        Int4Linear(codes, scales, zeros, None, group=GROUP, is_nf4=kind == "nf4")
        for _ in range(count)
    ]


def int4_cases(quick: bool) -> Iterator[Case]:
    """Bound by their bytes at few rows, by the multiply-adds from 16 on."""
    for kind in KINDS:
        ops = layers(kind, quick)
        size_bytes = sum(op.size_bytes for op in ops)
        for rows in (1, 16) if quick else (1, 4, 8, 16, 64, 512):
            x = torch.randn(rows, NUM_IN)
            is_read = rows <= 8
            yield Case(
                f"{kind} linear",
                f"M={rows} K={NUM_IN} N={NUM_OUT}",
                "read" if is_read else "i8",
                size_bytes if is_read else 2.0 * rows * NUM_IN * NUM_OUT * len(ops),
                0.8 if is_read else 0.6,
                lambda x=x, ops=ops: [op(x) for op in ops],
            )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ops4", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few small shapes")
    parser.add_argument("--only", default="", help="kernels whose name holds this")
    args = parser.parse_args()
    console, limits, rounds = Console(), Limits(), 3 if args.quick else 11
    wanted = (case for case in int4_cases(args.quick) if args.only in case.name)
    readings = [measure(case, limits, rounds) for case in wanted]
    report(readings, console)
    head = {"isa": native.instruction_set(), "threads": native.num_threads()}
    print(json.dumps({**head, "readings": [asdict(r) for r in readings]}))


if __name__ == "__main__":
    main()
