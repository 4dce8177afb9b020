"""`serve bench prefix-cache`: measures the time to the first token with a cached prefix.

It compares prompts without a cached prefix, with the prefix in memory, and with the prefix on disk
after a restart. It reports medians, and whether the tokens equal those without a cached prefix.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.common import tables
from bench.common.checkpoints import model_directory
from serve import LLM, SamplingParams
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.models import read_spec

_TAIL = 8  # tokens of a prompt after the prefix
_ROOM = 64  # tokens of the context beside the prefix


def prefix_cache(
    model: str | None = "random:llama-1b",
    *,
    prefix: int | None = None,
    repeats: int | None = None,
    json_file: Path | None = None,
    quick: bool = False,
) -> dict[str, Any]:
    """Prints and returns the figures. model is a directory, "random:SHAPE", or None for the
    embedded model. prefix is the number of tokens that the prompts share."""
    tables.check_file(json_file)
    path = model_directory("random:tiny" if quick and model == "random:llama-1b" else model)
    config = EngineConfig.from_settings(path)
    longest = read_spec(config.model_path).max_model_len
    length, num_repeats = prefix or (500 if quick else 4000), repeats or (2 if quick else 5)
    if not 1 <= length <= longest - _ROOM or num_repeats < 1:
        raise ConfigError(
            f"prefix must be 1 to {longest - _ROOM} tokens with this model, and repeats positive"
        )
    head = tables.Head.now(f"prefix-cache, {config.model_name}")
    with tempfile.TemporaryDirectory(prefix="mergestep-prefix-") as folder:
        measured = measure(path, length, folder, num_repeats)
    table = Table("prefix", "TTFT, ms", "times faster", "cached tokens", "same token")
    table.title = f"{length} tokens cached, {_TAIL} new"
    rows: dict[str, Any] = {}
    base = statistics.median(seconds for seconds, _, _ in measured["computed"])
    for name, answers in measured.items():
        ms = [1e3 * seconds for seconds, _, _ in answers]
        pairs = zip(answers, measured["computed"], strict=False)
        is_same = all(one[2] == first[2] for one, first in pairs)
        cached = answers[0][1]
        rows[name] = {"ms": ms, "cached_tokens": cached, "is_same": is_same}
        speedup = 1e3 * base / statistics.median(ms)
        table.add_row(name, tables.spread(ms), f"{speedup:.0f}", str(cached), str(is_same))
    console = tables.console()
    console.print(str(head), highlight=False, soft_wrap=True)
    console.print(table)
    tables.write(json_file, head, rows)
    return rows


def measure(
    model: str | None, length: int, folder: str, repeats: int
) -> dict[str, list[tuple[float, int, list[int]]]]:
    """Returns a list for each place of the prefix, with (seconds to the first token, number of
    cached tokens, the token) for each prompt."""
    settings: dict[str, Any] = {"max_model_len": length + _ROOM, "max_num_seqs": 2}
    rng = random.Random(1)
    prompts = [[rng.randrange(300, 1000) for _ in range(length)]]
    prompts += [
        [*prompts[0], *(rng.randrange(300, 1000) for _ in range(_TAIL))] for _ in range(repeats)
    ]
    with LLM(model, prefix_cache=False, **settings) as llm:
        _ask(llm, prompts[0][:64])
        cold = [_ask(llm, prompt) for prompt in prompts[1:3]]
    with LLM(model, kv_cache_dir=folder, **settings) as llm:
        _ask(llm, prompts[0])
        memory = [_ask(llm, prompt) for prompt in prompts[1:]]
    disk = []
    for prompt in prompts[1:]:
        with LLM(model, kv_cache_dir=folder, **settings) as llm:
            _ask(llm, prompts[0][::-1][:64])
            disk.append(_ask(llm, prompt))
    return {"computed": cold, "in memory": memory, "on disk, new process": disk}


def _ask(llm: LLM, token_ids: list[int]) -> tuple[float, int, list[int]]:
    """Returns the seconds to the first token, the number of cached tokens, and the token."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": token_ids}, params, use_tqdm=False)
    metrics = output.metrics
    assert metrics is not None and metrics.first_token_s is not None
    seconds = metrics.first_token_s - metrics.arrival_s
    return seconds, metrics.num_cached_tokens, output.outputs[0].token_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a tiny model, as a smoke test")
    parser.add_argument("--prefix", type=int, help="tokens that the prompts share")
    args = parser.parse_args()
    prefix_cache(prefix=args.prefix, quick=args.quick)


if __name__ == "__main__":
    main()
