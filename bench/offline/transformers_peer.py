"""Runs given requests with Hugging Face Transformers' generate in a separate process.

It has two modes: one left-padded batch of all requests, which runs until the longest answer is
done, and one request after the other. Answers are greedy, and only the requested tokens count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from serve.errors import ConfigError, MergestepError

MODES = ("one padded batch", "one by one")


class Load(NamedTuple):
    """Requests: the token ids of their prompts and the numbers of tokens to answer."""

    prompts: Sequence[Sequence[int]]
    output_lens: Sequence[int]


def require_transformers() -> None:
    """Raises ConfigError if Transformers is not installed."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ConfigError("peer transformers: it is not installed") from error


class TransformersPeer:
    """Transformers as a user would run it. It has its own process, since the OpenMP threads of two
    engines in one process would compete."""

    def __init__(self, path: Path, dtype: str) -> None:
        command = [sys.executable, "-m", __name__, str(path.resolve()), dtype]
        quiet = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | quiet,
            cwd=Path(__file__).parents[2],
        )
        self._receive()

    def run(self, mode: str, load: Load) -> float:
        """Returns the seconds that a load takes in one of MODES."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([mode, *load]) + "\n")
        self._process.stdin.flush()
        return self._receive()

    def _receive(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise MergestepError("peer transformers: its process has ended; see above")
        return float(line)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> TransformersPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> None:
    """Serves the model PATH in DTYPE (the two arguments): reads a load per line of JSON and prints
    its seconds. The first line that it prints says that the model is loaded."""
    from transformers import AutoModelForCausalLM

    path, dtype = sys.argv[1:]
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    model.eval()
    print(0.0, flush=True)
    for line in sys.stdin:
        mode, prompts, output_lens = json.loads(line)
        run = _run_padded if mode == MODES[0] else _run_each
        with torch.inference_mode():
            print(run(model, Load(prompts, output_lens)), flush=True)


def _run_padded(model: Any, load: Load) -> float:
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


if __name__ == "__main__":
    main()
