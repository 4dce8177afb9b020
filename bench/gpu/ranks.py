"""The engine on two processes: are the tokens those of one process?

With two GPUs each has its own, and tensor ranks exchange by NCCL and, beside it, through the host's
memory. With one they share it, and results pass through the host's memory, because a device cannot
exchange with itself: that shows bits and no speed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch

from bench.gpu.record import Figures, Record
from serve import LLM, SamplingParams
from serve.config import DEFAULT_MODEL

_PROMPTS = ("Once upon a time", "Hello", "The weather today is")
_NUM_TOKENS = 32
_TENSOR = {"tensor_parallel_size": 2}
_GRIDS = {"tensor": _TENSOR, "pipeline": {"pipeline_parallel_size": 2}}
_STAGED = {"tensor through the host": _TENSOR | {"group_exchange": "host"}}


def run(record: Record) -> None:
    # int8 first: its sums are exact, so every token must be equal
    for dtype in ("int8",) if record.is_dry else ("int8", "bfloat16"):
        has_several = torch.cuda.is_available() and torch.cuda.device_count() > 1
        for name, grid in (_GRIDS | (_STAGED if has_several else {})).items():
            record.run(f"{name} 2, {dtype}", partial(_compare, dtype, grid, record.is_dry))


def _compare(dtype: str, grid: Mapping[str, Any], is_dry: bool) -> Figures:
    """Returns how many answers of the built-in model are equal. In int8 all must be."""
    alone, alone_s = _of_one_process(dtype, is_dry)
    together, together_s = _answers(dtype, is_dry, **grid)
    same = sum(a == b for a, b in zip(alone, together, strict=True))
    assert dtype != "int8" or same == len(alone), f"{same} of {len(alone)} answers are equal"
    return {
        "answers": len(alone),
        "equal": same,
        "seconds": together_s,
        "seconds of one process": alone_s,
    }


@cache
def _of_one_process(dtype: str, is_dry: bool) -> tuple[list[list[int]], float]:
    return _answers(dtype, is_dry)


def _answers(dtype: str, is_dry: bool, **grid: Any) -> tuple[list[list[int]], float]:
    """Returns the tokens, of which the last answer's are sampled, and the seconds they took."""
    settings: dict[str, Any] = {"dtype": dtype, "backend": "cuda", "seed": 0, "tune": False}
    settings |= {"max_num_seqs": 4, "max_model_len": 256, "max_num_batched_tokens": 64}
    settings |= {"kv_cache_bytes": 256 << 20}
    prompts = _PROMPTS[-1:] if is_dry else _PROMPTS
    temperatures = (0.0, 0.0, 0.8)[-len(prompts) :]
    params = [
        SamplingParams(
            max_tokens=1 if is_dry else _NUM_TOKENS, temperature=each, seed=1, ignore_eos=True
        )
        for each in temperatures
    ]
    with LLM(DEFAULT_MODEL, **settings, **grid) as llm:
        began_s = time.perf_counter()
        found = llm.generate(list(prompts), params, use_tqdm=False)
        return [each.outputs[0].token_ids for each in found], time.perf_counter() - began_s
