"""Tuning of the model's products at the first start on a device.

Measurements are stored (ops/cuda/tune.py), so that later starts only measure what is missing. A
start spends half a minute at most; products without a measurement are chosen by rule.
"""

from __future__ import annotations

import logging

import torch

from ops.backend import LinearOp
from ops.cuda import tune
from ops.cuda.linear import CudaLinear
from serve.models import Decoder
from serve.models.layers.blocks import AttentionWeights, Block, DenseMlp, MixtureMlp
from serve.runner.graph_shapes import StepShapes

logger = logging.getLogger(__name__)

_BUDGET_S = 30.0
_ROWS = (1, 64, 16, 256)  # the most common step sizes; the largest follows


def tune_products(model: Decoder, shapes: StepShapes, device: torch.device) -> None:
    """Measures the products that have no stored choice. It never raises.

    Call it before graphs are captured, because layers keep their first choice.
    """
    try:
        table = tune.table(device)
        missing = [it for it in _products(model, shapes) if not table.has(it[0].shape(*it[1:]))]
        if not missing:
            return
        logger.info("measuring %d products, %d s at most", len(missing), _BUDGET_S)
        jobs = (op.job(rows, adds) for op, rows, adds in missing)
        measured = tune.tune(jobs, device, budget_s=_BUDGET_S)
        logger.info("%d products measured, stored in %s", len(measured), table.path)
    except Exception:
        logger.warning("measuring products failed; they are chosen by rule", exc_info=True)


def _products(model: Decoder, shapes: StepShapes) -> list[tuple[CudaLinear, int, bool]]:
    """Returns (product, rows, whether a residual is added) for the head and for the first of the
    layers that are described alike, which have the same shapes."""
    head = model.weights.head
    different = dict(zip(reversed(model.spec.layers), reversed(model.weights.blocks), strict=True))
    products = [pair for block in different.values() for pair in _block_products(block)]
    found = []
    for rows in dict.fromkeys((*_ROWS, tune.bucket(shapes.max_rows))):
        for op, adds in [*products, (head, False)]:
            most = shapes.max_sampled if op is head else shapes.max_rows
            is_needed = rows < 2 * most  # the next power of two covers all counts below it
            if is_needed and isinstance(op, CudaLinear) and op.kernel == "int8":
                found.append((op, rows, adds))
    return found


def _block_products(block: Block) -> list[tuple[LinearOp | None, bool]]:
    """Returns a block's products and whether each adds a residual."""
    found: list[tuple[LinearOp | None, bool]] = []
    mlp = block.mlp
    if isinstance(mlp, MixtureMlp):
        mlp = mlp.shared or mlp
    if isinstance(mlp, DenseMlp):
        found += [(mlp.up, False), (mlp.down, block.mlp_out is None and not block.is_parallel)]
    if isinstance(block.attention, AttentionWeights):
        weights = block.attention
        found += [(weights.q, False), (weights.qkv, False), (weights.o, block.attn_out is None)]
    return found
