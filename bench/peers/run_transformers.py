"""Runs Hugging Face Transformers for `serve bench latency`: run_transformers.py CHECKPOINT.

It needs torch and transformers, which the tests of this project have. Modes: "eager", and
"compiled" (torch.compile of the whole forward pass with a static K/V cache, one graph per shape).
Mixed requests run as one left-padded batch until the longest answer is done. --dtype is that of
weights and arithmetic.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import runner
import torch
import transformers
from runner import Prompt, Request
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache


class Transformers:
    modes = ("eager", "compiled")

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads)
        torch._dynamo.config.recompile_limit = 64  # a graph per shape
        self.name = f"Transformers {transformers.__version__}, {args.dtype}"
        dtype = getattr(torch, args.dtype)
        self._model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval()
        self._max_tokens = args.tokens
        self._forward: Callable[..., Any] = self._model.forward
        self._is_static = False

    def use(self, mode: str) -> None:
        self._is_static = mode == "compiled"
        self._forward = self._model.forward
        if self._is_static:
            self._forward = torch.compile(self._model.forward, dynamic=False)

    def first_token_s(self, prompt: Prompt) -> float:
        began = time.perf_counter()
        self._prefill([prompt])
        return time.perf_counter() - began

    def decode_s(self, prompts: list[Prompt], num_steps: int) -> float:
        tokens, state = self._prefill(prompts)
        tokens = self._step(tokens, state)  # the first step follows a prefill
        began = time.perf_counter()
        for _ in range(num_steps):
            tokens = self._step(tokens, state)
        return time.perf_counter() - began

    def answer_s(self, requests: list[Request]) -> float:
        began = time.perf_counter()
        tokens, state = self._prefill([prompt for prompt, _ in requests])
        for _ in range(max(number for _, number in requests) - 1):
            tokens = self._step(tokens, state)
        return time.perf_counter() - began

    @torch.inference_mode()
    def _prefill(self, prompts: list[Prompt]) -> tuple[torch.Tensor, dict[str, Any]]:
        """Returns the first tokens [prompts, 1] and the state of decoding."""
        longest, count = max(map(len, prompts)), len(prompts)
        # the mask covers all positions that will be decoded, so that its shape stays the same
        room = self._max_tokens if self._is_static else longest
        ids = torch.zeros(count, longest, dtype=torch.int64)
        mask = torch.zeros(count, room, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) : longest] = 1
        cache: Any = DynamicCache(config=self._model.config)
        if self._is_static:
            cache = StaticCache(config=self._model.config, max_cache_len=self._max_tokens)
        state = {"mask": mask, "cache": cache, "length": longest, "pads": longest - mask.sum(1)}
        positions = (torch.arange(longest)[None] - state["pads"][:, None]).clamp(min=0)
        return self._run(ids, positions, state), state

    @torch.inference_mode()
    def _step(self, tokens: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        at = state["length"]
        state["length"] += 1
        if self._is_static:
            state["mask"][:, at] = 1
        else:
            state["mask"] = torch.cat([state["mask"], torch.ones_like(tokens)], dim=1)
        return self._run(tokens, at - state["pads"][:, None], state)

    def _run(
        self, ids: torch.Tensor, positions: torch.Tensor, state: dict[str, Any]
    ) -> torch.Tensor:
        """Returns the likeliest next token of each row."""
        found = self._forward(
            input_ids=ids,
            attention_mask=state["mask"],
            position_ids=positions,
            past_key_values=state["cache"],
            use_cache=True,
            logits_to_keep=1,
        )
        likeliest: torch.Tensor = found.logits[:, -1:].argmax(-1)
        return likeliest


if __name__ == "__main__":
    parser = runner.options(__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    runner.serve(parser.parse_args(), Transformers)
