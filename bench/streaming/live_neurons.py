"""Which neurons of a trained model's MLPs are live, and how well that is known beforehand.

A neuron is live for a row if its value behind the activation is not zero. A row is a token of a
text, and `live` tensors are [rows, neurons] of booleans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.backend import LinearOp
from serve.engine.llm import LLM
from serve.sampling_params import SamplingParams

PANEL = 32  # neurons whose packed weights are together
BATCH = 8
_TRAINED = 0.75  # of the rows, from which what a predictor and an order need is learned
_SIGHT = 5  # rows whose neurons are kept in memory (LLM in a flash)


class Noted:
    """A product whose inputs and results are kept."""

    def __init__(self, op: LinearOp) -> None:
        self._op = op
        self.inputs: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        made = self._op(x)
        self.inputs.append(x.float().clone())
        self.values.append(made.float().clone())
        return made


@dataclass(slots=True)
class Activations:
    """Of one layer: the MLP's inputs [rows, hidden] before their norm, and the values behind its
    activation [rows, neurons]."""

    inputs: Tensor
    values: Tensor


def read_activations(model: str | None, text: Path, tokens: int) -> list[Activations]:
    """Computes a text, in prompts of 256 tokens, and returns what each layer saw of it."""
    with LLM(
        model,
        dtype="float32",
        kv_cache_bytes=64 << 20,
        max_model_len=512,
        prefix_cache=False,
        speculation="off",
    ) as llm:
        blocks = llm._loaded.core._runner._model.weights.blocks  # type: ignore[attr-defined]
        noted = [Noted(block.mlp.up) for block in blocks]
        for block, each in zip(blocks, noted, strict=True):
            block.mlp.up = each
        ids = llm.tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False)[
            :tokens
        ]
        # log-probabilities of the prompt make the last layer compute all of its rows
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        for start in range(0, len(ids), 256):
            llm.generate([ids[start : start + 256]], params, use_tqdm=False)
    return [Activations(torch.cat(each.inputs), torch.cat(each.values)) for each in noted]


@dataclass(slots=True)
class Liveness:
    """Of one layer, shares of its neurons.

    one: live for a row. eight: for one of 8 rows of different places. panels: blocks of 32 neurons
    with a live one for a row, and for one of 8, as they are in the file; sorted_panels: if neurons
    are ordered by how often they are live. fresh: live for a row and for none of the 5 before;
    window: live for one of these 5. predicted: to be computed so that 95 % and 99 % of the live
    ones are found, for one row; predicted_eight: for one of 8 rows, with 99 %.
    """

    one: float
    eight: float
    panels: tuple[float, float]
    sorted_panels: tuple[float, float]
    fresh: float
    window: float
    predicted: tuple[float, float]
    predicted_eight: float


def liveness(layer: Activations, rank: int, seed: int = 0, steps: int = 200) -> Liveness:
    """Measures rows that neither the order nor the predictor was made from."""
    live = layer.values != 0
    count = int(_TRAINED * len(live))
    made, met = live[:count], live[count:]
    draw = torch.randperm(len(met) // BATCH * BATCH, generator=_generator(seed))
    order = made.float().mean(0).argsort(descending=True)
    grouped = any_of(met[draw], BATCH)
    scores = predict(layer.inputs[:count], made, layer.inputs[count:], rank, seed, steps)
    many, most = (scores >= threshold(scores, met, recall) for recall in (0.95, 0.99))
    recent = in_window(met, _SIGHT)
    return Liveness(
        share(met),
        share(grouped),
        (share(panels(met)), share(panels(grouped))),
        (share(panels(met[:, order])), share(panels(grouped[:, order]))),
        share(met[_SIGHT:] & ~recent),
        share(recent),
        (share(many), share(most)),
        share(any_of(most[draw], BATCH)),
    )


def share(flags: Tensor) -> float:
    return float(flags.float().mean())


def any_of(live: Tensor, rows: int) -> Tensor:
    """Returns what one of `rows` consecutive rows needs: [rows / `rows`, neurons]."""
    return live.unflatten(0, (-1, rows)).any(1)


def panels(live: Tensor) -> Tensor:
    """Returns which blocks of 32 neurons have a live one; the last may be smaller."""
    missing = -live.shape[1] % PANEL
    return F.pad(live, (0, missing)).unflatten(1, (-1, PANEL)).any(2)


def in_window(live: Tensor, sight: int) -> Tensor:
    """Returns for each row behind the first `sight` what one of the `sight` before it needed."""
    return torch.stack([live[at : at + len(live) - sight] for at in range(sight)]).any(0)


def threshold(scores: Tensor, live: Tensor, recall: float) -> float:
    """Returns the largest score that `recall` of the live neurons reach."""
    found = scores[live].sort(descending=True).values
    return float(found[math.ceil(recall * len(found)) - 1]) if len(found) else 0.0


def predict(
    inputs: Tensor, live: Tensor, met: Tensor, rank: int, seed: int = 0, steps: int = 200
) -> Tensor:
    """Trains a predictor on inputs and live neurons, and returns its scores for others.

    Two products, as in Deja Vu and PowerInfer: hidden -> rank -> neurons, with a logistic loss."""
    generator = _generator(seed)
    hidden, size = inputs.shape[1], live.shape[1]
    low, high = nn.Linear(hidden, rank, bias=False), nn.Linear(rank, size)
    with torch.no_grad():
        low.weight.normal_(std=hidden**-0.5, generator=generator)
        high.weight.normal_(std=rank**-0.5, generator=generator)
        high.bias.zero_()
    optimizer = torch.optim.AdamW([*low.parameters(), *high.parameters()], weight_decay=0.0)
    inputs, live = F.rms_norm(inputs, (hidden,)), live.float()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / steps)
        rows = torch.randint(len(inputs), (512,), generator=generator)
        loss = F.binary_cross_entropy_with_logits(high(low(inputs[rows])), live[rows])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        return high(low(F.rms_norm(met, (hidden,))))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
