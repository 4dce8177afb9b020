"""Throughput of mixed-length requests: this engine against Transformers' generate, same run.

Sixteen requests with log-uniform prompt and output lengths, greedy, equal precision, equal
threads. Transformers serves them in two ways: as one left-padded batch (it runs until the
longest output is done) and one request after the other; the ratio is to the faster one.
Only the tokens that were asked for count. Rounds are interleaved, medians are reported.
Run: python -m bench.vs_transformers
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.checkpoints import SHAPES, random_checkpoint
from serve import LLM, SamplingParams

os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Load(NamedTuple):
    prompts: list[list[int]]
    output_lens: list[int]


def make_load(num_requests: int, max_prompt: int, max_output: int, vocab: int, seed: int) -> Load:
    """Lengths log-uniform in [16, max]: many short ones, a few long ones."""
    rng = random.Random(seed)

    def length(most: int) -> int:
        return round(math.exp(rng.uniform(math.log(min(16, most)), math.log(most))))

    prompts = [
        [rng.randrange(300, vocab) for _ in range(length(max_prompt))] for _ in range(num_requests)
    ]
    return Load(prompts, [length(max_output) for _ in range(num_requests)])


def run_ours(llm: LLM, load: Load) -> float:
    params = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in load.output_lens
    ]
    began = time.perf_counter()
    outputs = llm.generate(load.prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - began
    assert [len(o.outputs[0].token_ids) for o in outputs] == load.output_lens
    return elapsed


class TransformersPeer:
    """Transformers in a process of its own, as its user would run it: the OpenMP teams of two
    engines in one process would get in each other's way."""

    def __init__(self, path: Path, dtype: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_peer_loop, args=(other, path, dtype), daemon=True)
        self._process.start()
        self._pipe.recv()  # loaded

    def run(self, way: str, load: Load) -> float:
        self._pipe.send((way, load))
        seconds: float = self._pipe.recv()
        return seconds

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def _peer_loop(pipe: Connection, path: Path, dtype: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    pipe.send("loaded")
    while (job := pipe.recv()) is not None:
        way, load = job
        with torch.inference_mode():
            pipe.send(_run_padded(model, load) if way == "padded" else _run_each(model, load))


def _run_padded(model: Any, load: Load) -> float:
    """One left-padded batch, as long as its longest output."""
    longest = max(map(len, load.prompts))
    ids = torch.zeros(len(load.prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(load.prompts):
        ids[i, longest - len(prompt) :] = torch.tensor(prompt)
        mask[i, longest - len(prompt) :] = 1
    return _generate(model, ids, mask, max(load.output_lens))


def _run_each(model: Any, load: Load) -> float:
    total = 0.0
    for prompt, num_tokens in zip(load.prompts, load.output_lens, strict=True):
        ids = torch.tensor([prompt])
        total += _generate(model, ids, torch.ones_like(ids), num_tokens)
    return total


def _generate(model: Any, ids: torch.Tensor, mask: torch.Tensor, num_tokens: int) -> float:
    began = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        pad_token_id=0,
    )
    elapsed = time.perf_counter() - began
    assert out.shape[1] == ids.shape[1] + num_tokens
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--max-prompt", type=int, default=512)
    parser.add_argument("--max-output", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--skip-one-by-one", action="store_true", help="measure only the padded batch"
    )
    parser.add_argument("--smoke", action="store_true", help="seconds, for tests")
    args = parser.parse_args()
    if args.smoke:
        args.shape, args.max_prompt, args.max_output, args.rounds = "tiny", 40, 20, 1
    path = random_checkpoint(args.shape)
    vocab_size = SHAPES[args.shape]["vocab_size"]
    load = make_load(args.requests, args.max_prompt, args.max_output, vocab_size, args.seed)
    peer = TransformersPeer(path, args.dtype)
    with LLM(str(path), dtype=args.dtype, max_model_len=1024) as llm:
        ways: dict[str, Callable[[Load], float]] = {
            "mergestep": lambda load: run_ours(llm, load),
            "transformers, padded batch": lambda load: peer.run("padded", load),
        }
        if not args.skip_one_by_one:
            ways["transformers, one by one"] = lambda load: peer.run("each", load)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        warm_up = Load([prompt[:8] for prompt in load.prompts], [2] * len(load.prompts))
        for way in ways.values():
            way(warm_up)
        for _ in range(args.rounds):
            for name, way in ways.items():
                seconds[name].append(way(load))
    peer.close()
    report(args, load, seconds)


def report(args: argparse.Namespace, load: Load, seconds: dict[str, list[float]]) -> None:
    tokens, prompt_tokens = sum(load.output_lens), sum(map(len, load.prompts))
    print(
        f"{args.shape}, {args.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print(
        f"{args.requests} requests: {prompt_tokens} prompt tokens (longest "
        f"{max(map(len, load.prompts))}), {tokens} output tokens (longest {max(load.output_lens)})"
    )
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        spread = " ".join(f"{value:.1f}" for value in seconds[name])
        print(f"  {name:28s} {median:8.1f} s  {tokens / median:8.1f} output tok/s   ({spread})")
    best = min(value for name, value in medians.items() if name != "mergestep")
    ratio = best / medians["mergestep"]
    against = "the faster way of Transformers" if len(medians) > 2 else "the padded batch only"
    print(f"  ratio to {against}: {ratio:.2f}x")
    print(json.dumps({"ratio": ratio, "seconds": seconds, "output_tokens": tokens}))


if __name__ == "__main__":
    main()
