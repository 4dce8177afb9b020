"""Tuning of the model's products at the first start on a device.

Measurements are stored (ops/cuda/tune.py), so that later starts only measure what is missing. A
start spends half a minute at most; products without a measurement are chosen by rule.
"""

from __future__ import annotations

import logging

import torch

from ops.cuda import tune
from ops.cuda.linear import CudaLinear
from serve.models import Decoder
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
    """Returns (product, rows, whether a residual is added) for the first layer and the head.

    All layers have the same shapes.
    """
    layer, head = model.weights.layers[0], model.weights.head
    found = []
    for rows in dict.fromkeys((*_ROWS, tune.bucket(shapes.max_rows))):
        for op, adds in (
            (layer.up, False),
            (layer.down, True),
            (layer.qkv, False),
            (layer.o, True),
            (head, False),
        ):
            most = shapes.max_sampled if op is head else shapes.max_rows
            is_needed = rows < 2 * most  # the next power of two covers all counts below it
            if is_needed and isinstance(op, CudaLinear) and op.kernel == "int8":
                found.append((op, rows, adds))
    return found
