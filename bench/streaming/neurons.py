"""Whether leaving out neurons pays in an MLP: python -m bench.streaming.neurons.

In an MLP with ReLU a neuron whose input is not positive adds nothing: neither its row of up nor its
column of down need to be read, where it is known beforehand which neurons these are. Measured is

    dense       one MLP in int8 on the native kernels, as it is served
    chosen      the same with that share of the neurons, as if they were known and neighbours
    blocks      rows of 32 neurons (a panel of packed weights) of which one at least is chosen
    predictor   products of rank 128 that say which neurons to take
    disk        direct reads of the chosen neurons, a row of up and a column of down bundled, in the
                order of the file and in pieces of their size, beside reads of the whole MLP

Neurons are chosen at random with the given share; a real model's are not, and its share is a
property of its training, which random weights do not have: `--model` measures the share of zeros
behind the activation of a checkpoint (of the embedded model by default, which has SiLU, whose
values are not zero: the share of those that are small beside the largest one is shown).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ops import get_backend
from ops.backend import Fusion, LinearOp
from ops.cpu.native_quantized_linear import NATIVE
from serve.loading.streaming.speeds import disk_speed
from serve.loading.streaming.units import PIECE_BYTES, Piece
from serve.sampling_params import SamplingParams

SHARES = (0.1, 0.2, 0.5)
PANEL, RANK, REPEATS = 32, 128, 15
SMALL = (0.01, 0.05, 0.1)  # of a row's largest value


def median_s(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def mlp(hidden: int, size: int) -> tuple[LinearOp, LinearOp]:
    """Returns products up, with ReLU, and down."""
    up = NATIVE.int8([torch.randn(size, hidden) / hidden**0.5], None, Fusion(None, "relu"))
    return up, NATIVE.int8([torch.randn(hidden, size) / size**0.5], None, Fusion())


def run_mlp(ops: tuple[LinearOp, LinearOp], x: Tensor) -> Tensor:
    return ops[1](ops[0](x))


def kernel_table(hidden: int, size: int, rows: int) -> Table:
    table = Table(f"{rows} rows", "neurons", "time us", "of dense", "with predictor")
    x = torch.randn(rows, hidden)
    low = NATIVE.int8([torch.randn(RANK, hidden)], None, Fusion())
    high = NATIVE.int8([torch.randn(size, RANK)], None, Fusion())
    predict_s = median_s(lambda: high(low(x)))

    def timed(count: int) -> float:
        copies = max(2, (96 << 20) // (2 * hidden * count))  # more than the last cache holds
        many = [mlp(hidden, count) for _ in range(copies)]
        turns = iter(range(1 << 30))
        return median_s(lambda: run_mlp(many[next(turns) % copies], x))

    dense_s = timed(size)
    table.add_row("dense", f"{size}", f"{dense_s * 1e6:.0f}", "100%", "")
    for share in SHARES:
        # a step of several rows needs the neurons of all of them
        active = 1 - (1 - share) ** rows
        chosen = max(PANEL, round(size * active))
        blocks = min(size, PANEL * round(size / PANEL * (1 - (1 - active) ** PANEL)))
        for name, count in ((f"chosen, {share:.0%} each", chosen), ("in blocks of 32", blocks)):
            seconds = timed(count)
            both = (seconds + predict_s) / dense_s
            cells = f"{count}", f"{seconds * 1e6:.0f}", f"{seconds / dense_s:.0%}", f"{both:.0%}"
            table.add_row(name, *cells)
    return table


def disk_table(hidden: int, size: int, folder: Path | None) -> Table:
    """Reads chosen neurons from a file in which a neuron's row and column are side by side."""
    table = Table("read", "MB", "MB/s", "time of whole MLP")
    bundle = -(-2 * hidden // 4096) * 4096
    layers = 16
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path = Path(name) / "neurons"
        with path.open("wb") as file:
            for _ in range(layers):
                file.write(np.random.default_rng(0).bytes(bundle * size))
            os.fsync(file.fileno())
        total = bundle * size * layers
        step = PIECE_BYTES
        whole = [Piece(at, min(step, total - at), 0) for at in range(0, total, step)]
        all_rate = disk_speed(path, whole, 1.0)
        table.add_row("everything", f"{total / 1e6:.0f}", f"{all_rate / 1e6:,.0f}", "100%")
        for share in SHARES:
            draw = np.random.default_rng(1).random(size * layers) < share
            pieces = runs_of(draw, bundle)
            rate = disk_speed(path, pieces, 1.0)
            read = sum(piece.num_bytes for piece in pieces)
            spent = (read / rate) / (total / all_rate)
            table.add_row(
                f"chosen, {share:.0%}", f"{read / 1e6:.0f}", f"{rate / 1e6:,.0f}", f"{spent:.0%}"
            )
    return table


def runs_of(chosen: np.ndarray, bundle: int) -> list[Piece]:
    """Returns what is read: neighbours together, up to the most that is read at once."""
    pieces: list[Piece] = []
    for at in np.flatnonzero(chosen).tolist():
        last = pieces[-1] if pieces else None
        is_next = last is not None and last.start + last.num_bytes == at * bundle
        if last is not None and is_next and last.num_bytes + bundle <= PIECE_BYTES:
            pieces[-1] = last._replace(num_bytes=last.num_bytes + bundle)
        else:
            pieces.append(Piece(at * bundle, bundle, 0))
    return pieces


def sparsity_table(model: str | None) -> Table:
    """Measures the values behind the activation, over a text that the model writes."""
    from serve.engine.llm import LLM

    found: list[Tensor] = []
    llm = LLM(model, dtype="float32", kv_cache_bytes=64 << 20, max_model_len=512)
    blocks = llm._loaded.core._runner._model.weights.blocks  # type: ignore[attr-defined]
    for block in blocks:
        block.mlp.up = _Noted(block.mlp.up, found)
    params = SamplingParams(max_tokens=128, temperature=0.0, ignore_eos=True)
    llm.generate(["The weather in the mountains changes quickly, because"], params, use_tqdm=False)
    llm.shutdown()
    values = torch.cat([each.float().abs().flatten(0, -2) for each in found if each.numel()])
    largest = values.amax(-1, keepdim=True)
    table = Table("values behind the activation", "share")
    table.add_row("zero", f"{(values == 0).float().mean():.1%}")
    for part in SMALL:
        share = (values < part * largest).float().mean()
        table.add_row(f"below {part:.0%} of the row's largest", f"{share:.1%}")
    return table


class _Noted:
    """A product whose results are kept."""

    def __init__(self, op: LinearOp, found: list[Tensor]) -> None:
        self._op, self._found = op, found

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        made = self._op(x)
        self._found.append(made.clone())
        return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--size", type=int, default=8192, help="neurons")
    parser.add_argument("--rows", default="1,8", help="of a step, comma-separated")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured")
    parser.add_argument("--model", help="whose activations are measured; default: the embedded")
    args = parser.parse_args()
    get_backend("cpu")
    console = Console(width=100)
    for rows in map(int, args.rows.split(",")):
        console.print(kernel_table(args.hidden, args.size, rows))
    console.print(disk_table(args.hidden, args.size, args.folder))
    console.print(sparsity_table(args.model))


if __name__ == "__main__":
    main()
