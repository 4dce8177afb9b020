"""The engine on a GPU with its K/V on two memory nodes on the same host, over shared memory.

The nodes compute on this machine's processors, so the figures show what a step costs beside their
attention and not what nodes of their own would give.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from bench.common.node_processes import memory_nodes
from bench.gpu.engine import TINY, EnginePlan, measure
from bench.gpu.record import Figures, Record
from ops.cpu import native_library
from serve import LLM, SamplingParams
from serve.config import DEFAULT_MODEL
from serve.machine import usable_processors

_PROMPTS = ("Once upon a time", "Hello", "The weather today is")
_NUM_TOKENS = 48
_PLAN = EnginePlan(
    "llama-1b",
    ((16, 1024, 48), (1, 1024, 48)),
    (4096,),
    (16, 1024, 48),
    (16, 2048, 64),
    {"max_num_seqs": 64, "max_model_len": 8192, "max_num_batched_tokens": 1024},
)


def run(record: Record) -> None:
    if not native_library.is_available():
        record.put("skipped", reason="the nodes need the native kernels, which are not built")
        return
    for partition in ("head", "sequence"):
        count = 2 if record.is_dry else _NUM_TOKENS
        record.run(f"equality, {partition}", partial(_equality, partition, count))
    plan = TINY if record.is_dry else _PLAN
    with _two_nodes("256M" if record.is_dry else "8G") as settings:
        measure(record, plan, **settings)


class _two_nodes:
    """Yields the settings of an engine over two nodes, whose processes end with the block."""

    def __init__(self, capacity: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        threads = max(1, (usable_processors() - 2) // 2)
        path = Path(self._folder.name)
        self._nodes = memory_nodes(2, path, capacity=capacity, threads=threads)

    def __enter__(self) -> dict[str, Any]:
        urls = self._nodes.__enter__()
        return {
            "memory_nodes": tuple(urls),
            "memory_node_key_file": str(Path(self._folder.name) / "key"),
        }

    def __exit__(self, *error: Any) -> None:
        self._nodes.__exit__(*error)
        self._folder.cleanup()


def _equality(partition: str, num_tokens: int) -> Figures:
    """Returns how many greedy answers of the built-in model in fp32 are those of local K/V."""
    settings: dict[str, Any] = {"dtype": "float32", "backend": "cuda", "seed": 0}
    settings |= {"max_num_seqs": 4, "max_model_len": 256, "max_num_batched_tokens": 64}
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)

    def answers(**more: Any) -> list[list[int]]:
        with LLM(DEFAULT_MODEL, **settings, **more) as llm:
            found = llm.generate(list(_PROMPTS), params, use_tqdm=False)
        return [answer.outputs[0].token_ids for answer in found]

    local = answers()
    with _two_nodes("256M") as nodes:
        remote = answers(memory_partition=partition, **nodes)
    same = sum(a == b for a, b in zip(local, remote, strict=True))
    firsts = sum(a[0] == b[0] for a, b in zip(local, remote, strict=True))
    assert firsts == len(local), f"{same} of {len(local)} answers are equal, {firsts} first tokens"
    return {"answers": len(local), "equal": same}
