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
property of its training, which random weights do not have. Of a checkpoint with ReLU (`--model`)
its zeros are measured, how well a predictor finds the others, which ones neighbouring rows share,
and what leaving out the rest would gain (neuron_gain.py); the docs say how such a checkpoint is
trained. Without it, the embedded model's values behind its SiLU are shown, which are not zero: the
share of those that are small beside a row's largest one.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench.streaming.live_neurons import BATCH, PANEL, Activations, liveness, read_activations
from bench.streaming.live_neurons import share as share_of
from bench.streaming.neuron_gain import (
    bound,
    disk_rows,
    fastest,
    gain_table,
    liveness_table,
    memory_rows,
    plain,
    product,
)
from ops import get_backend
from ops.backend import Fusion
from serve.loading.streaming.speeds import disk_speed
from serve.loading.streaming.units import PIECE_BYTES, Piece

SHARES = (0.1, 0.2, 0.5)
RANK = 128
_FILE_LAYERS = 16
_TEXT = Path(__file__).parents[1] / "data" / "heldout.txt"
SMALL = (0.01, 0.05, 0.1)  # of a row's largest value


def seconds_of(run: Callable[[], object]) -> float:
    return fastest({"": run})[""]


def kernel_table(hidden: int, size: int, rows: int) -> Table:
    table = Table(f"{rows} rows", "neurons", "time us", "of dense", "with predictor")
    x = torch.randn(rows, hidden)
    low, high = product(RANK, hidden, Fusion()), product(size, RANK, Fusion())
    predict_s = seconds_of(lambda: high(low(x)))

    def timed(count: int) -> float:
        return seconds_of(bound(plain(hidden, count), x))

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


class NeuronFile:
    """A file on the disk in which a neuron's row and column are side by side."""

    def __init__(self, hidden: int, size: int, folder: Path) -> None:
        self._path, self._size = folder / "neurons", size * _FILE_LAYERS
        self._bundle = -(-2 * hidden // 4096) * 4096
        with self._path.open("wb") as file:
            for _ in range(_FILE_LAYERS):
                file.write(np.random.default_rng(0).bytes(self._bundle * size))
            os.fsync(file.fileno())
        self.total, step = self._bundle * self._size, PIECE_BYTES
        self._whole = [
            Piece(at, min(step, self.total - at), 0) for at in range(0, self.total, step)
        ]

    def all_rate(self) -> float:
        """Returns the bytes a second of reading everything."""
        return disk_speed(self._path, self._whole, 1.0)

    def chosen(self, share: float) -> tuple[int, float]:
        """Returns how much is read for neurons chosen at random, and the bytes a second."""
        pieces = runs_of(np.random.default_rng(1).random(self._size) < share, self._bundle)
        return sum(piece.num_bytes for piece in pieces), disk_speed(self._path, pieces, 1.0)

    def cost(self, share: float) -> float:
        """Returns the time of reading a share over that of reading everything, just measured."""
        num_bytes, rate = self.chosen(share)
        return (num_bytes / rate) / (self.total / self.all_rate())


def disk_table(file: NeuronFile) -> Table:
    """Reads chosen neurons."""
    table = Table("read", "MB", "MB/s", "time of whole MLP")
    all_rate, total = file.all_rate(), file.total
    table.add_row("everything", f"{total / 1e6:.0f}", f"{all_rate / 1e6:,.0f}", "100%")
    for share in SHARES:
        read, rate = file.chosen(share)
        spent = (read / rate) / (total / all_rate)
        cells = f"{read / 1e6:.0f}", f"{rate / 1e6:,.0f}", f"{spent:.0%}"
        table.add_row(f"chosen, {share:.0%}", *cells)
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


def sparsity_table(layers: Sequence[Activations]) -> Table:
    """Shares of the values behind the activation, of each layer."""
    names = [f"below {part:.0%} of the row's largest" for part in SMALL]
    table = Table("layer", "zero", *names)
    for number, layer in enumerate(layers):
        values = layer.values.abs()
        largest = values.amax(-1, keepdim=True)
        small = [share_of(values < part * largest) for part in SMALL]
        table.add_row(str(number), *(f"{each:.1%}" for each in (share_of(values == 0), *small)))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--size", type=int, default=8192, help="neurons")
    parser.add_argument("--rows", default="1,8", help="of a step, comma-separated")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured")
    parser.add_argument("--model", help="with ReLU, whose gain is measured; default: the embedded")
    parser.add_argument("--text", type=Path, default=_TEXT, help="that the model reads")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text")
    parser.add_argument("--rank", type=int, help="of --model's predictor; default: hidden / 8")
    args = parser.parse_args()
    get_backend("cpu")
    console = Console(width=110)
    counts = [int(each) for each in args.rows.split(",")]
    layers = read_activations(args.model, args.text, args.tokens)
    console.print(sparsity_table(layers))
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        file = NeuronFile(args.hidden, args.size, Path(name))
        if args.model is None:
            for rows in counts:
                console.print(kernel_table(args.hidden, args.size, rows))
            console.print(disk_table(file))
            return
        found = [liveness(layer, args.rank or layer.inputs.shape[1] // 8) for layer in layers]
        console.print(liveness_table(found))
        sizes = args.hidden, args.size, RANK
        gains = [row for rows in (1, BATCH) for row in memory_rows(found, *sizes, rows)]
        console.print(gain_table(gains + disk_rows(found, file.cost)))


if __name__ == "__main__":
    main()
