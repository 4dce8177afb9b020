"""What early choices change for K/V beyond memory: python -m bench.offload.guesses.

A layer's tiles are fetched while the layer before computes: those that it read for the last token
("last token"), or those that its queries choose which the layer before tells ("told"), or as a
server does, which keeps what is faster ("faster"). They take turns in one process, a few steps
each, so that they meet the same disk. Random K/V of a model with random weights, and exercises of
the trained model of `bench.offload.trained`. It prints

    tok/s       tokens a second of all sequences
    in memory   of the layers of 16 tokens that the steps read, those in memory when a layer began
    coming      those and the ones that were on their way
    fetched     MB a token from the file
    in vain     of these, what was fetched ahead and then not read, MB a token
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict

from rich.table import Column, Table

from bench.common import tables
from bench.offload.run import Decoding, long_checkpoint
from bench.offload.trained import offloaded_exercises
from memory.attention.early_choices import EarlyChoices
from memory.offload.residency import Residency
from memory.policies.setting import OFF
from serve.sampling_params import SamplingParams

_POLICIES = ("quest:budget=12%", "quest:budget=6%")
_TURN_STEPS = 3
_NAMES = {"last token": False, "told": True, "faster": None}


def compare(
    units: Residency, turn: Callable[[], tuple[float, int]], num_turns: int, settling_turns: int
) -> list[list[str]]:
    """Returns a row of each name. turn: computes some steps, and returns their seconds and tokens;
    each name has num_turns turns that count and one that does not. settling_turns: in which it
    shows what is faster, before all others."""
    totals: dict[str, Counter[str]] = {name: Counter() for name in _NAMES}
    EarlyChoices.always = None
    for _ in range(settling_turns):
        turn()
    for number in range(num_turns + 1):
        names = list(_NAMES) if number % 2 else list(reversed(_NAMES))
        for name in names:
            EarlyChoices.always = _NAMES[name]
            before = asdict(units.counts())
            seconds, tokens = turn()
            if number == 0:
                continue
            after = asdict(units.counts())
            totals[name].update({key: after[key] - before[key] for key in after})
            totals[name].update({"seconds": seconds, "tokens": tokens})
    return [_row(name, total) for name, total in totals.items()]


def _row(name: str, total: Counter[str]) -> list[str]:
    read, tokens = total["units_read"], total["tokens"]
    in_vain = total["ahead_bytes"] - total["ahead_used_bytes"]
    return [
        name,
        f"{tokens / total['seconds']:.1f}",
        f"{total['units_held'] / read:.3f}",
        f"{(total['units_held'] + total['units_coming']) / read:.3f}",
        f"{total['fetched_bytes'] / tokens / 1e6:.2f}",
        f"{in_vain / tokens / 1e6:.2f}",
    ]


def random_rows(policy: str, share: float, given: argparse.Namespace) -> list[list[str]]:
    with tempfile.TemporaryDirectory() as made:
        model = long_checkpoint(given.shape, given.context, made)
        sizes = given.sequences, given.context, share
        decoding = Decoding(model, policy, "int8", *sizes, given.folder)
        units = decoding.runtime.offload
        assert units is not None

        def turn() -> tuple[float, int]:
            decoding.step()
            seconds = sum(decoding.step() for _ in range(_TURN_STEPS))
            return seconds, _TURN_STEPS * given.sequences

        settling = -(-given.settling // (_TURN_STEPS + 1))
        rows = compare(units, turn, given.turns, settling)
        del units
        decoding.close()
    return rows


def trained_rows(policy: str, share: float, given: argparse.Namespace) -> list[list[str]]:
    with (
        tempfile.TemporaryDirectory() as folder,
        offloaded_exercises(policy, share, folder, tokens=given.tokens) as (llm, prompts),
    ):
        units = llm._loaded.offload
        assert units is not None
        params = SamplingParams(temperature=0.0, max_tokens=given.tokens, ignore_eos=True)

        def turn() -> tuple[float, int]:
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - began, given.tokens * len(prompts)

        return compare(units, turn, given.turns, -(-given.settling // given.tokens))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=32, help="of a turn of the trained model")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.125])
    parser.add_argument("--policies", nargs="+", default=_POLICIES)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--settling", type=int, default=80, help="steps that try what is faster")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="of the file")
    parser.add_argument("--models", nargs="+", default=["random", "trained"])
    given = parser.parse_args(arguments)
    names = ("tok/s", "in memory", "coming", "fetched", "in vain")
    for model in given.models:
        rows_of = random_rows if model == "random" else trained_rows
        table = Table(
            "kv_policy, K/V in memory",
            "",
            *[Column(name, justify="right") for name in names],
            title=f"{model} model",
        )
        for policy in given.policies:
            assert policy != OFF, "rows that select"
            for share in given.shares:
                for row in rows_of(policy, share, given):
                    table.add_row(f"{policy}, {share:g}", *row)
        tables.console().print(table)


if __name__ == "__main__":
    main()
