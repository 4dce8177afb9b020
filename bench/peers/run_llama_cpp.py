"""Runs llama.cpp with Q8_0 weights for `serve bench latency`: run_llama_cpp.py MODEL.gguf.

It needs a virtual environment with `pip install llama-cpp-python`, which compiles it for this
processor, and a MODEL.gguf that convert_llama_cpp.py has written. Prompts run one after the other,
and then all sequences are decoded together without pauses, which is at least as fast as llama.cpp's
server.
"""

from __future__ import annotations

import argparse
import ctypes
import time

import columns
import llama_cpp as llama
import numpy as np
from columns import Prompt, Request

MAX_SEQUENCES, MAX_TOKENS, MAX_BATCHED_TOKENS = 32, 1024, 512
Row = tuple[int, int, int, bool]  # token, position, sequence, whether its logits are needed


class LlamaCpp:
    def __init__(self, args: argparse.Namespace) -> None:
        self.name = f"llama.cpp (llama-cpp-python {llama.__version__}), Q8_0"
        llama.llama_backend_init()
        path = str(args.model).encode()
        self._model = llama.llama_model_load_from_file(path, llama.llama_model_default_params())
        assert self._model, f"cannot load {args.model}"
        settings = llama.llama_context_default_params()
        settings.n_ctx = MAX_SEQUENCES * MAX_TOKENS
        settings.n_seq_max = MAX_SEQUENCES
        settings.n_batch = settings.n_ubatch = MAX_BATCHED_TOKENS
        settings.n_threads = settings.n_threads_batch = args.threads
        self._context = llama.llama_init_from_model(self._model, settings)
        assert self._context, "no context"
        vocab = llama.llama_model_get_vocab(self._model)
        self.vocab_size = llama.llama_vocab_n_tokens(vocab)
        self._batch = llama.llama_batch_init(MAX_BATCHED_TOKENS, 0, 1)

    def first_token_s(self, prompt: Prompt) -> float:
        began = time.perf_counter()
        self._prefill([prompt])
        return time.perf_counter() - began

    def decode(self, prompts: list[Prompt], num_tokens: int) -> float:
        tokens = self._prefill(prompts)
        began = time.perf_counter()
        for step in range(num_tokens):
            rows = [
                (token, len(prompt) + step, i, True)
                for i, (prompt, token) in enumerate(zip(prompts, tokens, strict=True))
            ]
            tokens = self._run(rows)
        return num_tokens * len(prompts) / (time.perf_counter() - began)

    def answer(self, requests: list[Request]) -> int:
        first = self._prefill([prompt for prompt, _ in requests])
        last, answered = dict(enumerate(first)), dict.fromkeys(range(len(first)), 1)
        while True:
            running = [i for i in last if answered[i] < requests[i][1]]
            if not running:
                return sum(answered.values())
            rows = [(last[i], len(requests[i][0]) + answered[i] - 1, i, True) for i in running]
            for i, token in zip(running, self._run(rows), strict=True):
                last[i] = token
                answered[i] += 1

    def _prefill(self, prompts: list[Prompt]) -> list[int]:
        """Clears the K/V cache, computes the prompts and returns the first token of each."""
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        tokens = []
        for i, prompt in enumerate(prompts):
            assert len(prompt) <= MAX_BATCHED_TOKENS, f"{len(prompt)} tokens"
            tokens += self._run([(t, at, i, at + 1 == len(prompt)) for at, t in enumerate(prompt)])
        return tokens

    def _run(self, rows: list[Row]) -> list[int]:
        """Returns the likeliest next token of each row whose logits are needed."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, needs_logits) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, needs_logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        assert llama.llama_decode(self._context, batch) == 0
        return [self._likeliest(i) for i, row in enumerate(rows) if row[3]]

    def _likeliest(self, row: int) -> int:
        logits = llama.llama_get_logits_ith(self._context, row)
        address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(address, (self.vocab_size,)).argmax())


if __name__ == "__main__":
    columns.measure(columns.options(__doc__).parse_args(), LlamaCpp)
