"""What an EAGLE-3 head costs and gains: python -m bench.engine.draft_heads.

The model and its head have random weights, so that the head's tokens are never right. What it
computes is real; then its tokens are replaced by the known answer's, each of which is right at a
given rate. One engine computes the same requests without the head and with it, in turn; the answers
are the same, which is checked. Measured are the steps that only decode: tokens per second, over
those without the head.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.common import tables
from bench.common.checkpoint_shapes import config_of
from bench.common.checkpoints import write_random
from bench.common.scripted_drafts import ScriptedDrafter
from bench.engine.speculation import RATES, Arm, Requests, Rig, measure, sampled
from serve import LLM
from serve.scheduler.sequence import Sequence
from serve.speculation.speculation import Speculation


def write_head(path: Path, model: dict[str, Any]) -> None:
    """Writes the configuration of a head that is as wide as the model, with 32,000 tokens."""
    names = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "rms_norm_eps",
        "rope_theta",
        "max_position_embeddings",
    )
    config = {name: model[name] for name in names if name in model}
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": min(32_000, model["vocab_size"]),
    }
    (path / "config.json").write_text(json.dumps(config))


class ScriptedHead:
    """A head whose tokens are replaced by those of known answers, right at a given rate."""

    def __init__(self, rig: Rig) -> None:
        core: Any = rig.llm._loaded.core
        drafting = core._scheduler.drafting
        assert isinstance(drafting, Speculation) and drafting._by_model is not None
        # lookup would find the answers of the arm before
        drafting.drafter = ScriptedDrafter({}, 0.0)
        drafts: Any = drafting._by_model.model
        self._compute, drafts.draft = drafts.draft, self._draft
        self.rig = rig
        self._runner = core._runner
        self._follower = self._runner._follower
        self._answers: dict[tuple[int, ...], list[int]] = {}
        self._rate = 0.0
        self._rng = random.Random(0)

    def without(self, *_: object) -> None:
        self._runner._follower = None
        self.rig.without()

    def right_at(self, rate: float) -> Arm:
        """Returns what lets the head draft tokens that are right at this rate."""

        def begin(requests: Requests, answers: list[list[int]]) -> None:
            prompts = [tuple(prompt["prompt_token_ids"]) for prompt in requests[0]]
            self._answers = dict(zip(prompts, answers, strict=True))
            self._rate = rate
            self._runner._follower = self._follower
            self.rig.with_own()

        return begin

    def _draft(self, sequences: list[Sequence], depths: list[int]) -> list[list[int]]:
        drafts: list[list[int]] = self._compute(sequences, depths)
        for sequence, draft in zip(sequences, drafts, strict=True):
            answer, at = (
                self._answers[sequence.request.prompt_token_ids],
                sequence.num_output_tokens,
            )
            for i, token in enumerate(answer[at : at + len(draft)]):
                draft[i] = token if self._rng.random() < self._rate else token ^ 1
        return drafts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="llama-1b", help="of random weights")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 4, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    console = tables.console()
    console.print(str(tables.Head.now("an EAGLE-3 head")), soft_wrap=True)
    names = [f"{rate:.0%} right" for rate in RATES]
    table = Table("batch", "no head, tokens/s", *names)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as head:
        config = config_of(args.shape)
        write_random(Path(folder), config, args.shape, has_weights=False)
        write_head(Path(head), config)
        settings: dict[str, Any] = {"load_format": "random", "dtype": "int8", "max_model_len": 2048}
        settings |= {"max_num_seqs": max(args.batch), "prefix_cache": False}
        with LLM(folder, speculation="eagle3", draft_model=head, **settings) as llm:
            scripted = ScriptedHead(Rig(llm))
            arms: dict[str, Arm] = {"none": scripted.without}
            arms |= {name: scripted.right_at(rate) for name, rate in zip(names, RATES, strict=True)}
            for batch in args.batch:
                make = partial(sampled, batch, config["vocab_size"])
                found = measure(scripted.rig, make, arms, args.rounds)
                cells = [f"{found[name] / found['none']:.2f}x" for name in names]
                table.add_row(str(batch), f"{found['none']:.1f}", *cells)
    console.print(table)


if __name__ == "__main__":
    main()
