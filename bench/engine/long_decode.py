"""Decoding over long contexts with K/V in 8 and in 4 bits: python -m bench.engine.long_decode.

Two models with the same random weights, one for each type of K/V, take turns step by step, so that
both see the same machine. Contexts are filled in (bench/common/filled_run.py). Measured are

    decode   the median of the steps in which every sequence decodes one token
    chunk    the median of steps with 256 rows of one prompt, which end at this length
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from bench.common import tables
from bench.common.checkpoint_shapes import config_of
from bench.common.checkpoints import write_random
from bench.common.filled_run import FilledRun
from serve.config import EngineConfig
from serve.loading.runtime import Runtime, load_runtime
from serve.scheduler.step_plan import SchedulerLimits

KV_DTYPES = ("int8", "int4")
ROWS, CHUNKS = 256, 4
_ANSWER = 600  # tokens; while one context is filled in, the sequences before it decode


@dataclass(frozen=True, slots=True)
class Case:
    """So many sequences of one length, in tokens."""

    sequences: int
    context: int


CASES = (Case(1, 16384), Case(1, 32768), Case(8, 4096), Case(8, 16384))


class Arm:
    """A model with one type of K/V, which runs one case at a time."""

    def __init__(self, model: Path, kv_dtype: str, cases: Sequence[Case]) -> None:
        self._config = config = EngineConfig(
            model=str(model),
            load_format="random",
            dtype="int8",
            kv_dtype=kv_dtype,
            max_num_seqs=max(case.sequences for case in cases),
            max_num_batched_tokens=ROWS,
            max_model_len=max(case.context for case in cases) + _ANSWER,
            prefix_cache=False,
            kv_cache_bytes=4 << 30,
            seed=0,
        )
        self._runtime: Runtime | None = load_runtime(config)
        self._run = FilledRun(self._runtime, SchedulerLimits.of(config))
        self.token_bytes = self._runtime.kv.token_bytes

    def chunks(self, context: int) -> list[float]:
        """Returns the seconds of the last steps of a prompt."""
        sequence = self._run.add(context, 1)
        self._run.fill(sequence, context - CHUNKS * ROWS)
        return [seconds for _, seconds in self._run.chunks(sequence)]

    def begin(self, case: Case) -> None:
        """Fills in the contexts of a case."""
        sequences = [self._run.add(case.context, _ANSWER) for _ in range(case.sequences)]
        for sequence in sequences:
            self._run.fill(sequence, case.context)

    def step(self) -> float:
        """Returns the seconds in which each sequence decodes a token."""
        return self._run.step()

    def end(self) -> None:
        self._run.finish()

    def close(self) -> None:
        assert self._runtime is not None
        kv, memory = self._runtime.kv, self._runtime.memory
        self._runtime = None  # its views of the K/V memory must go first
        del self._run
        kv.close_all()
        memory.close()


def measure(shape: str, cases: Sequence[Case], steps: int) -> Table:
    """Measures the cases, with steps of each type in turn."""
    table = Table(
        "K/V", "bytes a token", "sequences", "context", "decode ms", "tokens/s", "chunk ms"
    )
    with tempfile.TemporaryDirectory() as folder:
        longest = max(case.context for case in cases) + _ANSWER
        config = config_of(shape) | {"max_position_embeddings": longest}
        write_random(Path(folder), config, shape, has_weights=False)
        arms = {kv_dtype: Arm(Path(folder), kv_dtype, cases) for kv_dtype in KV_DTYPES}
    for case in cases:
        chunks = {name: arm.chunks(case.context) for name, arm in arms.items()}
        for arm in arms.values():
            arm.begin(case)
        times: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(steps):
            for name, arm in arms.items():
                times[name].append(arm.step())
        for name, arm in arms.items():
            arm.end()
            step_s, chunk_s = (
                statistics.median(x[len(x) // 4 :]) for x in (times[name], chunks[name])
            )
            table.add_row(
                name,
                f"{arm.token_bytes:,}",
                str(case.sequences),
                f"{case.context:,}",
                f"{1e3 * step_s:.1f}",
                f"{case.sequences / step_s:.1f}",
                f"{1e3 * chunk_s:.0f}",
            )
    for arm in arms.values():
        arm.close()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="llama-1b", help="of the random weights")
    parser.add_argument("--steps", type=int, default=24, help="measured steps of each type")
    parser.add_argument("--quick", action="store_true", help="a tiny model, as a smoke test")
    args = parser.parse_args()
    quick = (Case(1, 2048), Case(2, 1500))
    console = tables.console()
    console.print(str(tables.Head.now("decoding over long contexts")), soft_wrap=True)
    shape, cases = ("tiny", quick) if args.quick else (args.shape, CASES)
    console.print(measure(shape, cases, args.steps))


if __name__ == "__main__":
    main()
