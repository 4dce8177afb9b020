"""Models whose layers have states: python -m bench.engine.states.

Steps of the real scheduler and runner with random weights, over contexts that are filled in
(bench/common/filled_run.py). Measured are

    decode    the median of the steps in which every sequence decodes a token, and the share of the
              least time by bytes: weights, states read and written, K/V of the other layers
    prefill   prompts of 512 tokens from their beginning, beside a dense model whose blocks have as
              many weights; the two take turns

Ceilings are read before and after each case.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.common import tables
from bench.common.ceilings import Probe
from bench.common.checkpoint_shapes import config_of
from bench.common.checkpoints import write_random
from bench.common.filled_run import FilledRun
from bench.common.model_cost import ModelCost
from serve.config import EngineConfig
from serve.loading.runtime import Runtime, load_runtime
from serve.models import count_parameters
from serve.scheduler.step_plan import SchedulerLimits
from serve.scheduler.step_time import StepWork

PROMPT = 512
_ANSWER = 600
_HEAD_DIM, _KV_HEADS = 128, 4  # of the dense model


@dataclass(frozen=True, slots=True)
class Case:
    """So many sequences of one length, in tokens."""

    sequences: int
    context: int


CASES = (Case(1, 1024), Case(1, 4096), Case(1, 16384), Case(1, 65536), Case(8, 1024))


class Arm:
    """A model with random weights, which runs one case at a time."""

    def __init__(self, folder: Path, dtype: str, longest: int, sequences: int) -> None:
        self._config = config = EngineConfig(
            model=str(folder),
            load_format="random",
            dtype=dtype,
            max_num_seqs=sequences,
            max_num_batched_tokens=PROMPT,
            max_model_len=longest + _ANSWER,
            prefix_cache=False,
            speculation="off",
            kv_cache_bytes=4 << 30,
            seed=0,
        )
        self._runtime: Runtime | None = load_runtime(config)
        self._run = FilledRun(self._runtime, SchedulerLimits.of(config))
        self.cost = ModelCost.of(config, self._runtime.spec, self._runtime.kv.token_bytes)
        self.weights = count_parameters(self._runtime.spec).blocks

    def prompt(self) -> float:
        """Returns the seconds of a prompt of PROMPT tokens."""
        sequence = self._run.add(PROMPT, 1)
        return sum(seconds for _, seconds in self._run.chunks(sequence))

    def decode(self, case: Case, steps: int) -> float:
        """Returns the median seconds of steps of a case."""
        sequences = [self._run.add(case.context, _ANSWER) for _ in range(case.sequences)]
        for sequence in sequences:
            self._run.fill(sequence, case.context)
        times = [self._run.step() for _ in range(steps)]
        self._run.finish()
        return statistics.median(times[steps // 4 :])

    def close(self) -> None:
        assert self._runtime is not None
        kv, memory = self._runtime.kv, self._runtime.memory
        self._runtime = None  # its views of the K/V memory must go first
        del self._run
        kv.close_all()
        memory.close()


def dense_like(config: dict[str, Any], block_weights: int) -> dict[str, Any]:
    """Returns the configuration of a dense model with so many weights in as many blocks: its
    attention makes up the difference."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    rows = block_weights / layers / hidden - 3 * config["intermediate_size"]
    heads = (rows - 2 * _KV_HEADS * _HEAD_DIM) / (2 * _HEAD_DIM)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, round(heads / _KV_HEADS)) * _KV_HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "intermediate_size": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "tie_word_embeddings": True,
        "max_position_embeddings": config["max_position_embeddings"],
        "rope_theta": 10000.0,
    } | {key: config[key] for key in ("torch_dtype", "bos_token_id", "eos_token_id")}


def measure(shape: str, dtype: str, cases: Sequence[Case], steps: int) -> list[Table]:
    longest = max(case.context for case in cases)
    config = config_of(shape)
    sequences = max(case.sequences for case in cases)
    with tempfile.TemporaryDirectory() as folder:
        write_random(Path(folder), config, shape, has_weights=False)
        arm = Arm(Path(folder), dtype, longest, sequences)
    probe = Probe("cpu")
    table = Table("sequences", "context", "decode ms", "tokens/s", "share of the bound")
    table.title = f"{shape}, {dtype}"
    for case in cases:
        before = probe()
        seconds = arm.decode(case, steps)
        ceiling = before.mean(probe())
        work = StepWork(case.sequences, case.sequences * case.context, case.sequences, samples=True)
        share = arm.cost.step(work).bound_s(ceiling) / seconds
        table.add_row(
            str(case.sequences),
            f"{case.context:,}",
            f"{1e3 * seconds:.1f}",
            f"{case.sequences / seconds:.1f}",
            f"{share:.0%} of {ceiling}",
        )
    with tempfile.TemporaryDirectory() as folder:
        like = dense_like(config, arm.weights)
        write_random(Path(folder), like, f"dense like {shape}", has_weights=False)
        dense = Arm(Path(folder), dtype, PROMPT, 1)
    times: list[tuple[float, float]] = [(arm.prompt(), dense.prompt()) for _ in range(steps)]
    own_s, dense_s = (statistics.median(column) for column in zip(*times[1:], strict=True))
    prompts = Table("model", "weights in blocks", "prefill tokens/s", "of the dense one")
    prompts.add_row(
        shape, f"{arm.weights / 1e6:,.0f} M", f"{PROMPT / own_s:,.0f}", f"{dense_s / own_s:.2f}"
    )
    prompts.add_row("dense", f"{dense.weights / 1e6:,.0f} M", f"{PROMPT / dense_s:,.0f}", "1")
    for each in (arm, dense):
        each.close()
    return [table, prompts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen3.5-4b", help="of the random weights")
    parser.add_argument("--dtype", action="append", help="int8 and int4 by default")
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each case")
    parser.add_argument("--quick", action="store_true", help="a small model, as a smoke test")
    args = parser.parse_args()
    console = tables.console()
    console.print(str(tables.Head.now("models with states")), soft_wrap=True)
    shape, cases = args.shape, list(CASES)
    if args.quick:
        shape, cases = "tiny-states", [Case(1, 600), Case(2, 600)]
    for dtype in args.dtype or ("int8", "int4"):
        for table in measure(shape, dtype, cases, args.steps):
            console.print(table)


if __name__ == "__main__":
    main()
