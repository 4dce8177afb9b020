"""Time to the first token with a known prefix: python -m bench.prefix_cache [--quick].

A prompt computed from nothing, one whose beginning is in memory, and one whose beginning is on
the disk after a restart; medians, and the tokens of each compared with the first way's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile

from rich.console import Console
from rich.table import Table

from bench.checkpoints import random_checkpoint
from serve import LLM, SamplingParams

_TAIL = 8  # tokens of a prompt that nobody has seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a tiny model, as a smoke test")
    parser.add_argument("--prefix", type=int, help="tokens that the prompts share")
    args = parser.parse_args()
    shape, length = (
        ("tiny", args.prefix or 500) if args.quick else ("llama-1b", args.prefix or 4000)
    )
    with tempfile.TemporaryDirectory(prefix="mergestep-prefix-") as folder:
        Console().print(measure(shape, length, folder, repeats=2 if args.quick else 5))


def measure(shape: str, length: int, folder: str, repeats: int) -> Table:
    model = str(random_checkpoint(shape))
    settings = {"max_model_len": length + 64, "max_num_seqs": 2}
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
    table = Table("prefix", "first token ms", "times sooner", "cached tokens", "same token")
    table.title = f"{length} tokens known, {_TAIL} new; {shape}"
    base = statistics.median(seconds for seconds, _, _ in cold)
    for name, found in (("computed", cold), ("in memory", memory), ("on disk, new process", disk)):
        seconds = statistics.median(seconds for seconds, _, _ in found)
        is_same = all(one[2] == first[2] for one, first in zip(found, cold, strict=False))
        cached = str(found[0][1])
        table.add_row(name, f"{1e3 * seconds:.1f}", f"{base / seconds:.0f}", cached, str(is_same))
    return table


def _ask(llm: LLM, token_ids: list[int]) -> tuple[float, int, list[int]]:
    """Seconds to the first token, tokens found in the cache, the token."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": token_ids}, params, use_tqdm=False)
    metrics = output.metrics
    assert metrics is not None and metrics.first_token_s is not None
    seconds = metrics.first_token_s - metrics.arrival_s
    return seconds, metrics.num_cached_tokens, output.outputs[0].token_ids


if __name__ == "__main__":
    main()
