"""Hugging Face Transformers' generate, in a process of its own, on given requests.

In two ways: all requests as one left-padded batch, which runs until the longest answer is done, and
one request after the other. Greedy; only the tokens that were asked for count.
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

WAYS = ("one padded batch", "one by one")


class Load(NamedTuple):
    """Requests: prompts and how many tokens to answer."""

    prompts: Sequence[Sequence[int]]
    output_lens: Sequence[int]


def require_transformers() -> None:
    """Raises ConfigError where Transformers cannot be used."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ConfigError("peer transformers: it is not installed") from error


class TransformersPeer:
    """Transformers as its user would run it, in a process of its own since the OpenMP threads of
    two engines in one process would compete."""

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

    def run(self, way: str, load: Load) -> float:
        """Returns the seconds that a load takes."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([way, *load]) + "\n")
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
    """PATH DTYPE. A line of JSON for every load in, its seconds out; the first line: loaded."""
    from transformers import AutoModelForCausalLM

    path, dtype = sys.argv[1:]
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    model.eval()
    print(0.0, flush=True)
    for line in sys.stdin:
        way, prompts, output_lens = json.loads(line)
        run = _run_padded if way == WAYS[0] else _run_each
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
