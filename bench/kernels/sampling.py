"""Choosing tokens against reading their logits once: `python -m bench.kernels.sampling`.

Each way is timed next to a plain read of the same bytes by the same threads, by turns, so that
both see the same machine. The figure that counts is the ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial

import torch

from ops.cpu import native, sampling
from serve.request import Request
from serve.runner.sampler import sample
from serve.sampling_params import SamplingParams
from serve.scheduler.sequence import Sequence, make_sequences

WAYS: dict[str, dict[str, float | int]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k_p": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
}


def make_logits(rows: int, size: int) -> torch.Tensor:
    """Like a model's: a few likely tokens over a wide floor."""
    logits = torch.randn(rows, size) * 2
    if size > 50:
        logits[:, torch.randperm(size)[:50]] += torch.linspace(6, 14, 50)
    return logits


def make_rows(count: int, **params: float | int) -> list[Sequence]:
    settings = SamplingParams(max_tokens=9, seed=0, **params)  # type: ignore[arg-type]
    request = [Request(str(i), None, (1, 2, 3), settings, 0.0) for i in range(count)]
    return [make_sequences(r, frozenset({2}))[0] for r in request]


def microseconds(calls: list[Callable[[], object]], rounds: int) -> list[float]:
    """Median of each call, the calls made in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, into in zip(calls, times, strict=True):
            began = time.perf_counter()
            call()
            into.append(time.perf_counter() - began)
    return [statistics.median(t) * 1e6 for t in times]


def main(arguments: SequenceOf[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="256,128000")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--smoke", action="store_true", help="see only that it runs")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.sizes, args.rows, args.rounds = "300", "2", 2
    library = native.library()
    print(f"{native.instruction_set()}, {native.num_threads()} threads; microseconds, medians")
    names = list(WAYS)
    heads = ["vocab", "rows", "read", "argmax", *names]
    print(" ".join(f"{head:>8}" for head in heads))
    results = []
    for size in map(int, args.sizes.split(",")):
        for rows in map(int, args.rows.split(",")):
            logits = make_logits(rows, size)
            read = partial(library.read_bytes, logits.data_ptr(), rows * size * 4)
            calls: list[Callable[[], object]] = [read, partial(sampling.argmax, logits)]
            calls += [partial(sample, logits, make_rows(rows, **WAYS[n])) for n in names]
            times = microseconds(calls, args.rounds)
            print(f"{size:8} {rows:8} " + " ".join(f"{t:8.1f}" for t in times))
            results.append({"vocab": size, "rows": rows, "us": [round(t, 1) for t in times]})
    print(json.dumps({"ways": ["read", "argmax", *names], "results": results}))


if __name__ == "__main__":
    main()
