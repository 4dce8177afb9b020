"""Log-probabilities of a model in one step, without an engine, and how far they are apart."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from memory.attention.seam import AttentionStep
from serve.cli.eval import parse_precision
from serve.config import EngineConfig
from serve.loading.runtime import load_runtime


def logprobs_of(path: str | Path, precision: str, tokens: list[int]) -> Tensor:
    """Returns log-probabilities [len(tokens), vocab] after each token; precision as `serve eval`
    takes it."""
    dtype, kv_dtype = parse_precision(precision)
    config = EngineConfig(model=str(path), dtype=dtype, kv_dtype=kv_dtype, max_num_seqs=1)
    runtime = load_runtime(config)
    with torch.inference_mode():
        item = runtime.kv.open(len(tokens))
        assert runtime.kv.grow(item, len(tokens))
        runtime.kv.commit()
        step = AttentionStep(0, [item.start], [len(tokens)], [len(tokens)])
        attention = runtime.attention.plan(step)
        positions = torch.arange(len(tokens))
        hidden = runtime.model.forward(torch.tensor(tokens), positions, attention)
        result = torch.log_softmax(runtime.model.logits(hidden), -1).double()
    memory = runtime.memory
    del runtime
    memory.close()
    return result


def divergence(one: Tensor, other: Tensor) -> Tensor:
    """Returns the KL divergence of each row of log-probabilities, [rows]."""
    return (one.exp() * (one - other)).sum(-1)
