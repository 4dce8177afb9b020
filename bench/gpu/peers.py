"""Transformers at 64 streams on the same shape, in each of its fast modes; the best one counts.

Every request has the same length, so that the batch has no padding. tokens_per_s are the generated
tokens over the whole time, prompts included, as in our engine's case "streams".
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.common.checkpoint_shapes import SHAPES
from bench.gpu.engine import EIGHT_B, TINY
from bench.gpu.record import Figures, Record
from bench.gpu.timing import device

os.environ.setdefault("HF_HUB_OFFLINE", "1")
_COMPILE_S = 35.0  # a compiled mode does not start with less time left


def run(record: Record) -> None:
    plan = TINY if record.is_dry else EIGHT_B
    count, prompt, answer = plan.streams
    models: list[Any] = []
    record.run("load", partial(_load, models, plan.shape))
    if not models:
        return
    ids = torch.randint(2, SHAPES[plan.shape]["vocab_size"], (count, prompt), device=device())
    modes: dict[str, Callable[[int], int]] = {
        "generate, dynamic cache": partial(_generate, models[0], ids, {}),
        "generate_batch": partial(_generate_batch, models[0], ids),
        "generate, static cache, compiled": partial(
            _generate, models[0], ids, {"cache_implementation": "static"}
        ),
    }
    if record.is_dry:
        modes = dict(list(modes.items())[:1])
    for name, mode in modes.items():
        if "compiled" in name and record.left_s() < _COMPILE_S:
            record.fail(name, "there was no time left to compile it")
            continue
        record.run(name, partial(_timed, mode, answer))
        _free_caches()


def _load(models: list[Any], shape: str) -> Figures:
    """Appends a model to models, with random weights that are made on the device."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    settings = SHAPES[shape] | {"rope_theta": 500000.0, "rms_norm_eps": 1e-5}
    config = LlamaConfig(**settings, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    began = time.perf_counter()
    with torch.device(device()):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    models.append(model.to(device()).eval())
    return {"load_s": time.perf_counter() - began, "dtype": str(model.dtype)}


def _timed(mode: Callable[[int], int], answer: int) -> Figures:
    """Times the second of two runs, the first of which compiles and warms up. mode: a function
    that generates `answer` tokens for each request and returns the number of all tokens."""
    warm_up = time.perf_counter()
    mode(answer)
    began = time.perf_counter()
    tokens = mode(answer)
    _synchronize()
    whole = time.perf_counter() - began
    return {
        "total_s": whole,
        "tokens": tokens,
        "tokens_per_s": tokens / whole,
        "warm_up_s": began - warm_up,
    }


@torch.inference_mode()
def _generate(model: Any, ids: torch.Tensor, options: dict[str, Any], answer: int) -> int:
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=answer,
        min_new_tokens=answer,
        pad_token_id=0,
        **options,
    )
    _synchronize()
    return int(out[:, ids.shape[1] :].numel())


def _generate_batch(model: Any, ids: torch.Tensor, answer: int) -> int:
    from transformers import GenerationConfig

    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=answer, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    found = model.generate_batch(ids.tolist(), generation_config=config)
    _synchronize()
    tokens = sum(len(each.generated_tokens) for each in found.values())
    assert tokens == ids.shape[0] * answer, f"{tokens} tokens came"
    return tokens


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _free_caches() -> None:
    """Frees caches of one mode before the next."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
