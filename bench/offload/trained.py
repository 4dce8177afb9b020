"""What a trained model reads of K/V on the disk: python -m bench.offload.trained.

The model of `serve eval --kv-policy` answers exercises with contexts of 4,096 tokens, all of them
at once, with a half of their K/V in memory (`--share`). Their prompts were computed before, so that
the figures are those of decoding: of all layers of 16 tokens, how many the steps read, and how many
of these were in memory. A tile counts as read if one K/V head reads it.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Column, Table

from bench.common import tables
from bench.quality.tasks import make_exercises
from memory.policies.setting import OFF
from serve.engine.llm import LLM
from serve.sampling_params import SamplingParams

_MODEL = Path(__file__).parents[1] / "quality" / "model"
_POLICIES = (OFF, "quest:budget=25%", "quest:budget=12%", "quest:budget=6%")
_PAGE_BYTES = 64 << 10  # so that bounds of several tiles share a system page
_PADDED_TOKEN_BYTES = 1024  # four layers in units of 4,096 bytes
_TILE = 16


@contextlib.contextmanager
def offloaded_exercises(
    policy: str,
    share: float,
    folder: str,
    *,
    context: int = 4096,
    count: int = 2,
    tokens: int = 32,
) -> Iterator[tuple[LLM, list[list[int]]]]:
    """Yields an engine with a share of its K/V in memory, and exercises whose prompts it has
    computed, `count` of each kind."""
    prompts = [exercise.prompt for exercise in make_exercises(context, count, 0)]
    longest = max(map(len, prompts)) + tokens
    needed = len(prompts) * longest * _PADDED_TOKEN_BYTES
    in_memory = int(share * needed)
    with LLM(
        _MODEL,
        kv_policy=policy,
        dtype="int8",
        kv_dtype="int8",
        kv_page_bytes=_PAGE_BYTES,
        max_model_len=-(-longest // _TILE) * _TILE,
        max_num_seqs=len(prompts),
        memory_policy="prompt_only",
        kv_cache_bytes=in_memory,
        kv_offload_bytes=needed * 5 // 4 - in_memory,
        kv_offload_dir=folder,
        speculation="off",
    ) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)
        yield llm, prompts


def _measure(policy: str, given: argparse.Namespace, folder: str) -> list[str]:
    settings = {"context": given.context, "count": given.exercises, "tokens": given.tokens}
    with offloaded_exercises(policy, given.share, folder, **settings) as (llm, prompts):
        units = llm._loaded.offload
        assert units is not None
        before = units.counts()
        params = SamplingParams(temperature=0.0, max_tokens=given.tokens, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)
        after = units.counts()
    num_layers = 4
    tiles = sum(-(-len(prompt) // _TILE) for prompt in prompts)
    read = after.units_read - before.units_read
    held = after.units_held - before.units_held
    fetched = after.fetched_bytes - before.fetched_bytes
    return [
        policy,
        f"{read / (tiles * num_layers * given.tokens):.3f}",
        f"{held / read:.3f}",
        f"{fetched / given.tokens / len(prompts) / 1e3:.0f}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--exercises", type=int, default=2, help="of each kind")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--share", type=float, default=0.5)
    given = parser.parse_args(arguments)
    table = Table(
        "kv_policy",
        *[Column(name, justify="right") for name in ("read", "in memory", "fetched KB a token")],
        title=f"contexts of {given.context:,} tokens, {given.share:g} of the K/V in memory",
    )
    for policy in _POLICIES:
        with tempfile.TemporaryDirectory() as folder:
            table.add_row(*_measure(policy, given, folder))
    tables.console().print(table)


if __name__ == "__main__":
    main()
