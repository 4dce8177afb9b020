"""Runs OpenVINO GenAI with int8 weights for `serve bench latency`: run_openvino.py MODEL.

It needs a virtual environment with `pip install openvino-genai "optimum-intel[openvino]"`, and a
MODEL that `optimum-cli export openvino --model CHECKPOINT --task text-generation-with-past
--weight-format int8 MODEL` has written. OpenVINO compiles its graph in both modes: "static batch"
(LLMPipeline), which does not run mixed requests, and "continuous batching"
(ContinuousBatchingPipeline). --group-size is the group of the dynamic quantization of activations.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
import runner
from runner import Prompt, Request

_STATIC, _CONTINUOUS = "static batch", "continuous batching"


class OpenVino:
    modes = (_STATIC, _CONTINUOUS)

    def __init__(self, args: argparse.Namespace) -> None:
        self.name = f"OpenVINO GenAI {genai.__version__}, int8 weights"
        self._path, self._max_sequences = str(args.model), args.sequences
        self._properties = {
            "INFERENCE_NUM_THREADS": args.threads,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": args.group_size,
        }
        self._pipeline: Any = None
        self._is_static = False

    def use(self, mode: str) -> None:
        self._pipeline = None  # frees the other mode's model first
        self._is_static = mode == _STATIC
        if self._is_static:
            self._pipeline = genai.LLMPipeline(self._path, "CPU", **self._properties)
            return
        scheduling = _scheduling(self._max_sequences)
        self._pipeline = genai.ContinuousBatchingPipeline(
            self._path, scheduling, "CPU", self._properties
        )

    def first_token_s(self, prompt: Prompt) -> float:
        began = time.perf_counter()
        if self._is_static:
            self._generate([prompt], 1)
        else:
            self._run([(prompt, 1)])
        return time.perf_counter() - began

    def decode_s(self, prompts: list[Prompt], num_steps: int) -> float:
        if self._is_static:
            found = self._generate(prompts, 1 + num_steps)
            assert [len(tokens) for tokens in found.tokens] == [1 + num_steps] * len(prompts)
            times_ms = found.perf_metrics.raw_metrics.m_new_token_times
            return float(times_ms[-1] - times_ms[0]) / 1e3
        lead = sum(map(len, prompts)) // 256 + 4  # the first ones decode while others are computed
        handles = self._add([(prompt, 1 + num_steps + lead) for prompt in prompts])
        seen: list[float] = []  # times of the steps since every request has a token
        counts = [0] * len(handles)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for i, handle in enumerate(handles):
                counts[i] += _num_new(handle)
            if min(counts) > 0:
                seen.append(time.perf_counter())
        return seen[num_steps] - seen[0]

    def answer_s(self, requests: list[Request]) -> float:
        if self._is_static:
            raise runner.Skip("mixed requests are no static batch")
        began = time.perf_counter()
        answered = self._run(requests)
        assert answered == sum(number for _, number in requests), f"{answered} tokens"
        return time.perf_counter() - began

    def _add(self, requests: list[Request]) -> list[Any]:
        return [
            self._pipeline.add_request(i, _ids([prompt]), _generation(number))
            for i, (prompt, number) in enumerate(requests)
        ]

    def _run(self, requests: list[Request]) -> int:
        """Answers all requests; returns the number of tokens."""
        handles = self._add(requests)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return sum(len(handle.read_all()[0].generated_ids) for handle in handles)

    def _generate(self, prompts: list[Prompt], num_tokens: int) -> Any:
        ids = _ids(prompts)
        mask = ov.Tensor(np.ones(ids.shape, dtype=np.int64))
        return self._pipeline.generate(genai.TokenizedInputs(ids, mask), _generation(num_tokens))


def _num_new(handle: Any) -> int:
    """Returns the tokens that a request got since the last call."""
    if not handle.can_read():
        return 0
    return sum(len(output.generated_ids) for output in handle.read().values())


def _ids(prompts: list[Prompt]) -> ov.Tensor:
    return ov.Tensor(np.array(prompts, dtype=np.int64))


def _generation(num_tokens: int) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens = num_tokens
    config.ignore_eos = True
    config.do_sample = False
    config.apply_chat_template = False
    return config


def _scheduling(max_sequences: int) -> genai.SchedulerConfig:
    config = genai.SchedulerConfig()
    config.cache_size = 2  # GB
    config.max_num_seqs = max_sequences
    config.max_num_batched_tokens = 2048
    config.dynamic_split_fuse = True
    return config


if __name__ == "__main__":
    parser = runner.options(__doc__)
    parser.add_argument("--group-size", type=int, default=128)
    runner.serve(parser.parse_args(), OpenVino)
