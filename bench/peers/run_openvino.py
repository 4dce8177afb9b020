"""Runs OpenVINO GenAI with int8 weights for `serve bench latency`: run_openvino.py MODEL.

It needs a virtual environment with `pip install openvino-genai "optimum-intel[openvino]"`, and a
MODEL that `optimum-cli export openvino --model CHECKPOINT --task text-generation-with-past
--weight-format int8 MODEL` has written. Static batches run in LLMPipeline, which is faster for
them, and mixed requests in ContinuousBatchingPipeline. --group-size is the group of the dynamic
quantization of activations.
"""

from __future__ import annotations

import argparse
import time

import columns
import numpy as np
import openvino as ov
import openvino_genai as genai
from columns import Prompt, Request


class OpenVino:
    def __init__(self, args: argparse.Namespace) -> None:
        self.name = f"OpenVINO GenAI {genai.__version__}, int8 weights"
        self.vocab_size = columns.vocab_size(args.model)
        self._path = str(args.model)
        self._properties = {
            "INFERENCE_NUM_THREADS": args.threads,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": args.group_size,
        }
        self._static = genai.LLMPipeline(self._path, "CPU", **self._properties)
        self._merged: genai.ContinuousBatchingPipeline | None = None

    def first_token_s(self, prompt: Prompt) -> float:
        began = time.perf_counter()
        self._generate([prompt], 1)
        return time.perf_counter() - began

    def decode(self, prompts: list[Prompt], num_tokens: int) -> float:
        found = self._generate(prompts, 1 + num_tokens)
        assert [len(tokens) for tokens in found.tokens] == [1 + num_tokens] * len(prompts)
        times_ms = found.perf_metrics.raw_metrics.m_new_token_times
        return len(prompts) * num_tokens / (times_ms[-1] - times_ms[0]) * 1000

    def answer(self, requests: list[Request]) -> int:
        if self._merged is None:
            self._static = None
            self._merged = genai.ContinuousBatchingPipeline(
                self._path, _scheduling(), "CPU", self._properties
            )
        handles = [
            self._merged.add_request(i, _ids([prompt]), _generation(number))
            for i, (prompt, number) in enumerate(requests)
        ]
        while self._merged.has_non_finished_requests():
            self._merged.step()
        return sum(len(handle.read_all()[0].generated_ids) for handle in handles)

    def _generate(self, prompts: list[Prompt], num_tokens: int) -> genai.EncodedResults:
        ids = _ids(prompts)
        mask = ov.Tensor(np.ones(ids.shape, dtype=np.int64))
        assert self._static is not None, "static batches run before mixed requests"
        return self._static.generate(genai.TokenizedInputs(ids, mask), _generation(num_tokens))


def _ids(prompts: list[Prompt]) -> ov.Tensor:
    return ov.Tensor(np.array(prompts, dtype=np.int64))


def _generation(num_tokens: int) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens = num_tokens
    config.ignore_eos = True
    config.do_sample = False
    config.apply_chat_template = False
    return config


def _scheduling() -> genai.SchedulerConfig:
    config = genai.SchedulerConfig()
    config.cache_size = 2  # GB
    config.max_num_seqs = 64
    config.max_num_batched_tokens = 2048
    config.dynamic_split_fuse = True
    return config


if __name__ == "__main__":
    parser = columns.options(__doc__)
    parser.add_argument("--group-size", type=int, default=128)
    columns.measure(parser.parse_args(), OpenVino)
