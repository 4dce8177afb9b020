"""At the first start on a device: which of several ways each product of the model takes.

What was measured is kept (ops/cuda/tune.py), so that later starts only measure what is missing. A
start gives it half a minute; what is not measured is chosen by rule.
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
_ROWS = (1, 64, 16, 256)  # of steps that are most common, and then the largest


def tune_products(model: Decoder, shapes: StepShapes, device: torch.device) -> None:
    """Before anything is captured, for layers keep what they chose once. Never raises."""
    try:
        known = tune.table(device)
        missing = [it for it in _products(model, shapes) if not known.has(it[0].shape(*it[1:]))]
        if not missing:
            return
        logger.info("measuring %d products, %d s at most; it is kept", len(missing), _BUDGET_S)
        jobs = (op.job(rows, adds) for op, rows, adds in missing)
        told = tune.tune(jobs, device, budget_s=_BUDGET_S)
        logger.info("%d products measured, kept in %s", len(told), known.path)
    except Exception:
        logger.warning("measuring products failed; they are chosen by rule", exc_info=True)


def _products(model: Decoder, shapes: StepShapes) -> list[tuple[CudaLinear, int, bool]]:
    """(product, rows, whether a residual is added). All layers are alike: those of the first one,
    and the head."""
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
            is_needed = rows < 2 * most  # the next power of two stands for all before it
            if is_needed and isinstance(op, CudaLinear) and op.kernel == "int8":
                found.append((op, rows, adds))
    return found
