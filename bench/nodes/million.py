"""A sequence of a million tokens over several holders: python -m bench.nodes.million.

The engine and each memory node, all on this machine with a thread each, hold a segment. All but the
last tokens of the prompt are filled in: their pages are mapped and hold zeros, since computing them
would take hours of attention. The rest is computed, during which the sequence grows onto a further
segment, and then it decodes. Measured are

    pause    the step in which the sequence grows beside the median of the steps around it
    decode   a step over all segments beside one of a sequence that fills the engine's own segment
             alone, which is what the slowest holder does

Holders that share a core wait for one another, so "decode" means something with as many cores as
holders.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.common.checkpoints import random_checkpoint
from bench.common.filled_run import FilledRun
from bench.common.node_processes import memory_nodes
from serve.config import EngineConfig
from serve.loading.runtime import load_runtime
from serve.scheduler.step_plan import SchedulerLimits

_SEGMENT_STEP = 128
_AROUND = 8  # steps before and after a growth with which it is compared


@dataclass(frozen=True, slots=True)
class Sizes:
    """tokens: of the prompt, of which the last `computed` ones are computed, `rows` in a step.
    steps: that decode, of each sequence."""

    tokens: int = 1 << 20
    computed: int = 32768
    rows: int = 256
    steps: int = 40
    holders: int = 3

    @property
    def segment_tokens(self) -> int:
        """Such that the sequence grows onto a further segment half-way through what is computed."""
        grows_at = self.tokens - self.computed // 2
        return -(-grows_at // self.holders // _SEGMENT_STEP) * _SEGMENT_STEP


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds of steps. pauses: of each step in which the sequence grew onto a segment, by the
    median of those around it. alone_s, decode_s: of a sequence within a segment and of the whole
    one. tokens: what was generated."""

    chunk_s: float
    pauses: list[float]
    alone_s: float
    decode_s: float
    tokens: list[int]

    @property
    def ratio(self) -> float:
        return self.decode_s / self.alone_s


def measure(sizes: Sizes, urls: Sequence[str], key: Path | None) -> Result:
    """Measures over the nodes at `urls`, one fewer than there are holders; with none, all segments
    are in this process."""
    config = EngineConfig(
        model=str(random_checkpoint("thin-16m")),
        dtype="int8",
        compute_threads=1,
        max_num_seqs=2,
        max_num_batched_tokens=sizes.rows,
        max_model_len=sizes.tokens + 2 * sizes.steps,
        kv_cache_bytes=512 * (sizes.tokens + 65536),
        prefix_cache=False,
        kvp=tuple(urls),
        kvp_segment_tokens=sizes.segment_tokens,
        memory_node_key_file=key,
    )
    runtime = load_runtime(config)
    try:
        run = FilledRun(runtime, SchedulerLimits.of(config))
        length = sizes.segment_tokens - sizes.steps - 8
        alone = run.add(length, sizes.steps)
        run.fill(alone, length - 1)
        run.chunks(alone)
        alone_s = run.decode(alone)
        whole = run.add(sizes.tokens, sizes.steps)
        run.fill(whole, sizes.tokens - sizes.computed)
        steps = run.chunks(whole)
        decode_s = run.decode(whole)
        tokens = list(whole.token_ids[sizes.tokens :])
        chunk_s = statistics.median(seconds for _, seconds in steps)
        pauses = _pauses(steps, sizes.segment_tokens)
        return Result(chunk_s, pauses, alone_s, decode_s, tokens)
    finally:
        runtime.kv.close_all()
        runtime.memory.close()


def _pauses(steps: Sequence[tuple[int, float]], segment_tokens: int) -> list[float]:
    """Returns how long each step took that grew onto a segment, in steps like those around it."""
    found = []
    for number in range(1, len(steps)):
        before, after = steps[number - 1][0], steps[number][0]
        if (before - 1) // segment_tokens < (after - 1) // segment_tokens:
            before_it = steps[max(0, number - _AROUND) : number]
            around = [*before_it, *steps[number + 1 : number + 1 + _AROUND]]
            usual_s = statistics.median(seconds for _, seconds in around)
            found.append(steps[number][1] / usual_s)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=Sizes().tokens)
    parser.add_argument(
        "--computed", type=int, default=Sizes().computed, help="of these, the last ones"
    )
    parser.add_argument("--holders", default="3", help="with commas, one measurement each")
    options = parser.parse_args()
    for holders in map(int, options.holders.split(",")):
        sizes = Sizes(options.tokens, options.computed, holders=holders)
        with (
            tempfile.TemporaryDirectory() as folder,
            memory_nodes(holders - 1, Path(folder), capacity="2G") as urls,
        ):
            found = measure(sizes, urls, Path(folder) / "key")
        print(
            f"{sizes.tokens:,} tokens over {holders} holders, {sizes.segment_tokens:,} a segment:"
            f" a chunk of {sizes.rows} rows takes {1e3 * found.chunk_s:.0f} ms; a step that grows"
            f" onto a segment {max(found.pauses):.2f} times as long as others; a decode step"
            f" {1e3 * found.decode_s:.1f} ms, {found.ratio:.2f}x of a segment alone"
            f" ({1e3 * found.alone_s:.1f} ms)",
            flush=True,
        )
        print(json.dumps({"holders": holders} | asdict(found)))


if __name__ == "__main__":
    main()
