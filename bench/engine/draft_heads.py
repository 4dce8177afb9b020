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
from serve.speculation.draft_ledger import DraftLedger
from serve.speculation.head_drafts import HeadDrafts
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
    """The head of an engine, with tokens that are replaced by those of known answers."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        core: Any = rig.llm._loaded.core
        self._kv, self._runner, self._model = core.kv, core._runner, core._scheduler.chunks.model
        self._head_drafts: HeadDrafts = self._runner._follower

    def without(self, *_: object) -> None:
        """From now on there is no head."""
        self._runner._follower = None
        self.rig.without()

    def right_at(self, rate: float) -> Arm:
        """Returns what lets the head draft tokens that are right at this rate. What was learned of
        them is not that of other rates."""
        own, rng = self._head_drafts, random.Random(0)
        drafts: Any = HeadDrafts(
            own._head, own._attention, self._kv, own._vocab_size, own.time.rows_per_step
        )
        compute, known = drafts.draft, dict[tuple[int, ...], list[int]]()

        def replaced(sequences: list[Sequence], depths: list[int]) -> list[list[int]]:
            found: list[list[int]] = compute(sequences, depths)
            for sequence, draft in zip(sequences, found, strict=True):
                at = sequence.num_output_tokens
                answer = known[tuple(sequence.request.prompt_token_ids)][at : at + len(draft)]
                for i, token in enumerate(answer):
                    draft[i] = token if rng.random() < rate else token ^ 1
            return found

        drafts.draft = replaced
        nothing = ScriptedDrafter({}, 0.0)  # lookup would find the answers of the arm before
        drafting = Speculation(nothing, self._model, self._kv, 15, None, drafts, DraftLedger())

        def begin(requests: Requests, answers: list[list[int]]) -> None:
            prompts = [tuple(prompt["prompt_token_ids"]) for prompt in requests[0]]
            known.clear()
            known.update(zip(prompts, answers, strict=True))
            self._runner._follower = drafts
            self.rig.use(drafting)

        return begin


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
