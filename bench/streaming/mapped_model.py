"""llama.cpp over a model that is mapped, under whatever limit its memory has.

    LLAMA_PYTHON -m bench.streaming.mapped_model MODEL.gguf < job.json

LLAMA_PYTHON as for mapped_experts.py. A job has sequences (prompts with the tokens that were
answered) and prompt (the tokens of each prompt). The sequences are computed once before they are
measured, so that the system has in memory what it keeps. The tokens are given: none is drawn.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from bench.streaming.mapped_experts import Llama, read_bytes
from serve.machine import memory_parts


def measured(path: Path, threads: int, job: dict[str, Any]) -> dict[str, float]:
    """Returns seconds, the bytes read from the disk meanwhile, and the memory afterwards: anonymous
    and of files, of which the model's is nearly all."""
    sequences, prompt = job["sequences"], job["prompt"]
    llama = Llama(path, threads, len(sequences), len(sequences[0]), is_watched=False)
    llama.answer([sequence[: prompt + 2] for sequence in sequences], prompt)
    before = read_bytes()
    seconds = llama.answer(sequences, prompt)
    read, parts = read_bytes() - before, memory_parts()
    return {
        "seconds": seconds,
        "read": read,
        "anonymous": parts["anonymous"],
        "file": parts["file"],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    print(json.dumps(measured(args.gguf.resolve(), args.threads, json.load(sys.stdin))))
