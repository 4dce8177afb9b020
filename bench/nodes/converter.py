"""The gain of early q in a converted model, at injected costs: predicted and measured.

The slices come from an exported graph (serve/converter) instead of the native decoder: inside a
slice what q needs is computed first, then q is sent, then k and v are computed. Costs, modes and
the formula are those of overlap.py. The model is a Helium, which has no row in the table of
families, with random weights.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from bench.nodes.injected import Clock, Costs, RealClock, TimedOp
from bench.nodes.overlap import EARLY_Q, TWO_BATCHES, InjectedResult, measure_injected, report
from serve.config import EngineConfig
from serve.converter.model import ConvertedModel
from serve.loading.runtime import Runtime
from serve.models import StepModel

CONFIG = {
    "model_type": "helium",
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "pad_token_id": None,
}


def slowed_graph(runtime: Runtime, costs: Costs, clock: Clock) -> StepModel:
    """Returns the runtime's converted model with its products at the injected costs."""
    model = runtime.model
    assert isinstance(model, ConvertedModel)
    shares = {
        "q_proj": costs.q_s,
        "k_proj": costs.kv_s / 2,
        "v_proj": costs.kv_s / 2,
        **dict.fromkeys(("o_proj", "gate_proj", "up_proj", "down_proj"), costs.rest_s / 4),
    }
    for name, product in model.products.items():
        seconds = shares.get(name.split(".")[-2])
        if seconds is not None:
            op = product.op.inner if isinstance(product.op, TimedOp) else product.op
            product.op = TimedOp(op, seconds, costs, clock)
    return model


def measure(clock: Clock, num_steps: int, cases: Iterable[Costs]) -> list[InjectedResult]:
    """Measures each case with num_steps steps in every mode."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        config = EngineConfig(model=folder, converter=True, load_format="random")
        return measure_injected(clock, num_steps, cases, slowed_graph, config)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.nodes.converter",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=20, help="steps of each figure, a median")
    parser.add_argument("--quick", action="store_true", help="one case, as a smoke test")
    args = parser.parse_args()
    cases = [EARLY_Q[1]] if args.quick else [*EARLY_Q[:7], TWO_BATCHES[2]]
    found = measure(RealClock(), 5 if args.quick else args.steps, cases)
    report(found)
    print(json.dumps([asdict(row) | {"error": row.error, "speedup": row.speedup} for row in found]))


if __name__ == "__main__":
    main()
