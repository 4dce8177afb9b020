"""What drafts gain: python -m bench.engine.speculation.

One engine computes the same requests without drafts and with them, in turn, so that all see the
same machine; the answers are the same, which is checked. Measured are the steps that only decode:
tokens per second, over those without drafts.

    scripted  drafts of the known answers, whose tokens are right at a given rate
    lookup    prompt lookup where the answer is the prompt with a few edits: a grammar allows only
              that text, as the weights are random; and in sampled answers, which repeat little
    index     the suffix automaton of prompt lookup alone, on random tokens that repeat as words do
    beside    scripted drafts of streams, while prompts arrive all the time
    model     a draft model: the target itself, its first layers, and one that agrees in nothing
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.common import tables
from bench.common.checkpoint_shapes import config_of
from bench.common.checkpoints import write_random
from bench.common.scripted_drafts import ScriptedDrafter, scripted_speculation
from bench.engine.speculation_beside import beside
from ops.cpu import native_library
from serve import LLM, SamplingParams
from serve.config import EngineConfig
from serve.scheduler.step_results import Drafting
from serve.structured_output import StructuredOutput

RATES = (0.0, 0.3, 0.6, 0.9)
BATCHES = (1, 4, 8, 32)
_ANSWER = 96

Requests = tuple[list[Any], list[SamplingParams]]
Arm = Callable[[Requests, list[list[int]]], None]
"""Exchanges the drafts, for requests with these answers."""


def edited_text(number: int) -> tuple[str, str]:
    """Returns a text that no other number has, and the same with two edits."""
    names = [f"{'abcdefghij'[(number * 3 + i * i) % 10]}{number + 5 * i}" for i in range(12)]
    text = "".join(
        f"    {name} = compute(values[{i}], weight={i * 7 % 11 + number}) + {name[0]}\n"
        for i, name in enumerate(names)
    )
    changed = text.replace("compute(values[3]", "estimate(values[3]")
    return text, changed.replace("values[8], weight", "others[8], weight")


class Rig:
    """An engine whose drafts are exchanged between runs."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._scheduler = llm._loaded.core._scheduler
        self._own = self._scheduler.drafting

    def without(self, *_: object) -> None:
        """From now on there are no drafts."""
        self._scheduler.drafting = None

    def use(self, drafting: Drafting) -> None:
        """From now on there are these drafts."""
        self._scheduler.drafting = drafting

    def with_own(self, *_: object) -> None:
        """From now on there are the drafts that the engine has by default."""
        self._scheduler.drafting = self._own

    def rate(self, requests: Requests) -> tuple[float, list[list[int]]]:
        """Returns the tokens per second of steps that only decode, and the answers."""
        prompts, params = requests
        trace = self.llm._loaded.core.view.traces.measure(1 << 20)
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        steps = list(trace.steps)
        answers = [list(each.outputs[0].token_ids) for each in outputs]
        first = max(i for i, step in enumerate(steps) if step.work.num_chunks) + 1
        seconds = steps[-1].ended_s - steps[first].began_s
        num_before = sum([step.num_running for step in steps[:first] if not step.work.num_chunks])
        num_tokens = sum(map(len, answers)) - len(answers) - num_before
        return num_tokens / seconds, answers


def measure(
    rig: Rig, make: Callable[[int], Requests], arms: dict[str, Arm], rounds: int
) -> dict[str, float]:
    """Returns the median tokens per second of each arm. Every round has other requests, which each
    arm computes in its turn; the first one has no drafts."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        requests = make(number)
        expected: list[list[int]] = []
        for name, begin in arms.items():
            begin(requests, expected)
            rate, answers = rig.rate(requests)
            assert expected in ([], answers), f"{name} changes tokens"
            expected = answers
            if number:  # the first round warms up
                found[name].append(rate)
    return {name: statistics.median(rates) for name, rates in found.items()}


def sampled(batch: int, vocab: int, number: int) -> Requests:
    """Returns requests that differ from those of any other number."""
    prompts = [
        {
            "prompt_token_ids": [
                (31 * i + 7 * k + 101 * number) % (vocab - 10) + 5 for k in range(64)
            ]
        }
        for i in range(batch)
    ]
    seeds = range(1000 * number, 1000 * number + batch)
    return prompts, [
        SamplingParams(max_tokens=_ANSWER, temperature=0.8, seed=seed, ignore_eos=True)
        for seed in seeds
    ]


def edited(batch: int, number: int) -> Requests:
    """Returns requests whose answers are their prompts with two edits."""
    texts = [edited_text(10 * number + i) for i in range(batch)]
    prompts = [
        f"Change this program:\n{text}\nThe program with its changes:\n" for text, _ in texts
    ]
    return prompts, [
        SamplingParams(
            max_tokens=600,
            temperature=0.0,
            structured=StructuredOutput("choice", json.dumps([changed])),
        )
        for _, changed in texts
    ]


def scripted(rig: Rig, batches: list[int], vocab: int, rounds: int) -> Table:
    """Measures drafts of known answers."""
    names = [f"{rate:.0%} right" for rate in RATES]
    table = Table("batch", "no drafts, tokens/s", *names)

    def arm(rate: float) -> Arm:
        drafter = ScriptedDrafter({}, rate)
        drafting = scripted_speculation(rig.llm, drafter)

        def begin(requests: Requests, answers: list[list[int]]) -> None:
            pairs = zip(requests[0], answers, strict=True)
            drafter.answers = {tuple(p["prompt_token_ids"]): [answer] for p, answer in pairs}
            rig.use(drafting)

        return begin

    arms = {"none": rig.without} | {
        name: arm(rate) for name, rate in zip(names, RATES, strict=True)
    }
    for batch in batches:
        found = measure(rig, partial(sampled, batch, vocab), arms, rounds)
        cells = [f"{found[name] / found['none']:.2f}x" for name in names]
        table.add_row(str(batch), f"{found['none']:.1f}", *cells)
    return table


def lookup(rig: Rig, batches: list[int], vocab: int, rounds: int) -> Table:
    """Measures prompt lookup where answers are edited prompts, and where little repeats."""
    table = Table("task", "batch", "no drafts, tokens/s", "lookup")
    arms: dict[str, Arm] = {"none": rig.without, "lookup": rig.with_own}
    for batch in batches:
        tasks: dict[str, Callable[[int], Requests]] = {
            "an edited prompt": partial(edited, batch),
            "sampled": partial(sampled, batch, vocab),
        }
        for name, make in tasks.items():
            found = measure(rig, make, arms, rounds)
            gain = found["lookup"] / found["none"]
            table.add_row(name, str(batch), f"{found['none']:.1f}", f"{gain:.2f}x")
    return table


def draft_models(shape: str, folder: Path) -> dict[str, str]:
    """Returns directories of draft models by what they are. Random weights depend on a tensor's
    name only, so that a model with fewer layers has the target's first ones."""
    if shape == "default":
        source = EngineConfig.from_settings(None).model_path
        config = json.loads((source / "config.json").read_text())
        path = folder / "first-layers"
        shutil.copytree(source, path)
        (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
        return {"itself": "default", "its first 2 layers": str(path)}
    config = config_of(shape)
    small = {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    found = {}
    for name, changed in {
        "its first layer": {"num_hidden_layers": 1},
        "a small model": small,
    }.items():
        path = folder / name.replace(" ", "-")
        path.mkdir()
        write_random(path, config | changed, name, has_weights=False)
        found[name] = str(path)
    return found


def by_model(
    model: str | None, draft: str, settings: dict[str, Any], args: argparse.Namespace, vocab: int
) -> list[list[str]]:
    """Measures a draft model. Returns for each batch the tokens per second without drafts, those
    with drafts over these, the draft tokens in steps, and how many of them agreed."""
    rows = []
    with LLM(model, speculation="model", draft_model=draft, **settings) as llm:
        rig = Rig(llm)
        arms: dict[str, Arm] = {"none": rig.without, "model": rig.with_own}
        for batch in args.batch:
            before = llm.stats()
            found = measure(rig, partial(sampled, batch, vocab), arms, args.rounds)
            after = llm.stats()
            drafted = after.num_draft_tokens - before.num_draft_tokens
            agreed = (after.num_accepted_tokens - before.num_accepted_tokens) / max(1, drafted)
            gain = found["model"] / found["none"]
            cells = [f"{found['none']:.1f}", f"{gain:.2f}x", str(drafted), f"{agreed:.0%}"]
            rows.append([str(batch), *cells])
    return rows


def index_cost(count: int = 100_000, rounds: int = 9) -> tuple[float, float]:
    """Returns the median nanoseconds and the bytes of a token in the index of a text."""
    rng = random.Random(0)  # few tokens are frequent and many are rare (Zipf)
    tokens = [min(int(rng.paretovariate(0.7)), 50_000) for _ in range(count)]
    seconds = []
    for _ in range(rounds):
        index = native_library.library().SuffixIndex()
        began_s = time.perf_counter()
        index.extend(tokens)
        seconds.append(time.perf_counter() - began_s)
    return 1e9 * statistics.median(seconds) / count, index.bytes / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="llama-1b", help="of random weights; or 'default'")
    parser.add_argument("--batch", type=int, nargs="*", default=list(BATCHES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", choices=("scripted", "lookup", "index", "beside", "model"))
    args = parser.parse_args()
    console = tables.console()
    console.print(str(tables.Head.now("speculative decoding")), soft_wrap=True)
    if args.part in (None, "index"):
        nanoseconds, num_bytes = index_cost()
        console.print(f"suffix automaton: {nanoseconds:.0f} ns and {num_bytes:.0f} bytes a token")
    if args.part == "index":
        return
    settings: dict[str, Any] = {"max_num_seqs": max(args.batch), "prefix_cache": False}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as drafts:
        if args.shape == "default":
            model, vocab = None, 4096
        else:
            config = config_of(args.shape)
            write_random(Path(folder), config, args.shape, has_weights=False)
            model, vocab = folder, config["vocab_size"]
            settings |= {"load_format": "random", "dtype": "int8", "max_model_len": 2048}
        if args.part in (None, "model"):
            table = Table(
                "draft model", "batch", "no drafts, tokens/s", "drafts", "drafted", "agree"
            )
            for name, draft in draft_models(args.shape, Path(drafts)).items():
                for row in by_model(model, draft, settings, args, vocab):
                    table.add_row(name, *row)
            console.print(table)
        if args.part in (None, "beside"):
            console.print(beside(model, settings, args.batch, vocab, args.rounds))
        if args.part in ("model", "beside"):
            return
        with LLM(model, **settings) as llm:
            rig = Rig(llm)
            if args.part != "lookup":
                console.print(scripted(rig, args.batch, vocab, args.rounds))
            if args.part != "scripted":
                console.print(lookup(rig, args.batch, vocab, args.rounds))


if __name__ == "__main__":
    main()
