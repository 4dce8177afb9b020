"""Trains the small model: `python -m bench.quality.train DIRECTORY --minutes 80`.

Texts get longer by stages: the heads that find a word by its predecessor form within minutes on
short texts and are stretched afterwards. A stage ends when the answers are right or its share of
the time is over. The state is saved every few minutes, and a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from bench.quality import texts
from bench.quality.network import Layer, Network, Shape, angles
from bench.quality.vocabulary import write_tokenizer

WEIGHTS = {texts.STRUCTURE: 0.1, texts.ANSWER: 1.0, texts.TEXT: 0.5}
FOCUS = 0.9  # how sharply the first heads look at one token at the start
SAVE_SECONDS = 180.0
LINE_SECONDS = 20.0


@dataclass(frozen=True)
class Stage:
    """Texts of some lengths in turn. share: of the whole time, at most. enough: the answers'
    accuracy."""

    lengths: tuple[int, ...]
    tokens: int  # of a step
    share: float
    rate: float
    enough: float = 0.98


STAGES = (
    Stage((64,), 8192, 0.15, 3e-3),
    Stage((128,), 8192, 0.1, 3e-3),
    Stage((256,), 8192, 0.1, 3e-3),
    Stage((512,), 8192, 0.1, 3e-3),
    Stage((1024,), 8192, 0.12, 2e-3),
    Stage((2048,), 12288, 0.15, 2e-3),
    Stage((1024, 4096, 2048, 8192), 8192, 1.0, 2e-3, 2.0),
)


@torch.no_grad()
def initialize(network: Network) -> None:
    """Starts the weights so that heads which compare words form early.

    The first K/V head of the first layer begins with heads that look at the token before and at
    the one before that: a constant part of the embeddings meets itself, turned by one and by two
    positions, in the dimensions that turn fast. In the other layers a group's keys begin like its
    queries, so that a token looks at those that are like it.
    """
    shape = network.shape
    width, heads = shape.head_dim, shape.num_attention_heads
    for name, weight in network.named_parameters():
        if weight.dim() == 2:
            scale = 0.5 if "o_proj" in name or "down_proj" in name else 1.0
            torch.nn.init.normal_(weight, std=scale * weight.shape[1] ** -0.5)
    embedding = network.model.embed_tokens.weight
    torch.nn.init.normal_(embedding, std=0.1)
    embedding[:, 0] = 0.1 * shape.hidden_size**0.5
    for index, layer in enumerate(network.model.layers):
        assert isinstance(layer, Layer)
        q = layer.self_attn.q_proj.weight.view(heads, width, -1)
        k = layer.self_attn.k_proj.weight.view(shape.num_key_value_heads, width, -1)
        if index > 0:
            for head in range(heads):
                q[head] = 0.7 * q[head] + 0.7 * k[head * len(k) // heads]
            continue
        fast = 5
        cos, sin = angles(shape, torch.arange(3))
        share = heads // len(k)
        for head in range(share):
            q[head] *= 0.1
            turn = min(head + 1, 2)
            q[head, :fast, 0] = FOCUS * cos[turn, :fast]
            q[head, width // 2 : width // 2 + fast, 0] = -FOCUS * sin[turn, :fast]
        k[0] *= 0.1
        k[0, :fast, 0] = FOCUS
        k[0, width // 2 : width // 2 + fast, 0] = 0


class Trainer:
    """The model, its optimizers and the place in the curriculum."""

    def __init__(self, directory: Path, minutes: float, seed: int) -> None:
        self.directory = directory
        self.seconds = minutes * 60
        torch.manual_seed(seed)
        self.network = Network(Shape())
        initialize(self.network)
        hidden = [w for w in self.network.model.layers.parameters() if w.dim() == 2]
        others = [w for w in self.network.parameters() if all(w is not h for h in hidden)]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(hidden, lr=0.01, weight_decay=0.0),
            torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.random = np.random.default_rng(seed)
        self.spent = self.stage_spent = 0.0
        self.stage = self.step = 0
        self.recent: dict[str, float] = {}
        if (directory / "state.pt").exists():
            self._resume()

    def run(self) -> None:
        """Trains until the time is over."""
        saved = printed = began = time.monotonic()
        while self.spent < self.seconds:
            self._step()
            now = time.monotonic()
            self.spent += now - began
            self.stage_spent += now - began
            began = now
            self._advance()
            if now - printed > LINE_SECONDS:
                printed = now
                shown = " ".join(f"{k} {v:.3f}" for k, v in self.recent.items())
                length = max(STAGES[self.stage].lengths)
                print(f"{self.spent:6.0f} s step {self.step} length {length} {shown}", flush=True)
            if now - saved > SAVE_SECONDS:
                saved = now
                self.save()
        self.save()

    def _advance(self) -> None:
        stage = STAGES[self.stage]
        good = self.recent.get("right", 0.0) > stage.enough
        if self.stage + 1 < len(STAGES) and (good or self.stage_spent > stage.share * self.seconds):
            self.stage += 1
            self.stage_spent = 0.0
            self.recent = {}

    def _step(self) -> None:
        stage = STAGES[self.stage]
        length = stage.lengths[self.step % len(stage.lengths)]
        made = texts.batch(self.random, stage.tokens // length, length)
        tokens, kinds = torch.from_numpy(made["tokens"]), torch.from_numpy(made["kinds"])
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.network.hidden(tokens)
        loss, figures = self._loss(hidden, tokens, kinds)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        rate = stage.rate / 3e-3 * self._schedule()
        for optimizer, base in zip(self.optimizers, (0.01, 3e-3), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        for name, value in figures.items():
            old = self.recent.get(name, value)
            self.recent[name] = 0.95 * old + 0.05 * value

    def _schedule(self) -> float:
        """Returns the share of the learning rate: a short start, and an end that cools down."""
        left = 1 - self.spent / self.seconds
        return min(1.0, (self.step + 1) / 50) * min(1.0, max(left, 0.02) / 0.35)

    def _loss(
        self, hidden: Tensor, tokens: Tensor, kinds: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        following, kinds = tokens[:, 1:].flatten(), kinds[:, 1:].flatten()
        learned = kinds != texts.NOTHING
        rows = hidden[:, :-1].flatten(0, 1)[learned]
        kinds, following = kinds[learned], following[learned]
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.network.logits(rows).float()
        losses = F.cross_entropy(logits, following, reduction="none")
        total = torch.zeros(())
        figures: dict[str, float] = {}
        for kind, weight in WEIGHTS.items():
            part = losses[kinds == kind]
            if len(part):
                total = total + weight * part.mean()
                name = {texts.STRUCTURE: "form", texts.ANSWER: "answer", texts.TEXT: "text"}[kind]
                figures[name] = float(part.detach().mean())
        answers = kinds == texts.ANSWER
        if bool(answers.any()):
            right = logits[answers].argmax(-1) == following[answers]
            figures["right"] = float(right.float().mean())
        return total, figures

    def save(self) -> None:
        """Writes the checkpoint, and the state from which a later run goes on."""
        state: dict[str, Any] = {
            "network": self.network.state_dict(),
            "optimizers": [one.state_dict() for one in self.optimizers],
            "random": self.random.bit_generator.state,
            "place": (self.spent, self.stage_spent, self.stage, self.step),
            "recent": self.recent,
        }
        partial = self.directory / "state.partial"
        torch.save(state, partial)
        partial.replace(self.directory / "state.pt")
        write_checkpoint(self.network, self.directory)

    def _resume(self) -> None:
        state = torch.load(self.directory / "state.pt", weights_only=False)
        self.network.load_state_dict(state["network"])
        for one, saved in zip(self.optimizers, state["optimizers"], strict=True):
            one.load_state_dict(saved)
        self.random.bit_generator.state = state["random"]
        self.spent, self.stage_spent, self.stage, self.step = state["place"]
        self.recent = state["recent"]


def write_checkpoint(network: Network, directory: Path) -> None:
    """Writes the model in Hugging Face's format, in bfloat16."""
    weights = {name: w.to(torch.bfloat16).contiguous() for name, w in network.state_dict().items()}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(network.shape.config(), indent=1) + "\n")
    write_tokenizer(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--minutes", type=float, default=80.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if not 0 < given.minutes < math.inf:
        parser.error("--minutes must be above 0")
    given.directory.mkdir(parents=True, exist_ok=True)
    Trainer(given.directory, given.minutes, given.seed).run()


if __name__ == "__main__":
    main()
