"""One process of limited.py: python -m bench.streaming.limited_model < job.json.

A job names the model, the folder of its packed weights, the tokens of each answer and the numbers
of requests. Without weight_memory_bytes all weights are in memory, and what is printed are the
answers; with it there is one number of requests, whose answers are compared with those.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.streaming.run import (
    Answers,
    answer,
    measure,
    open_model,
    packed_file,
    stream_of,
)
from serve.machine import memory_parts

_ALL = 1 << 40


def measured(job: dict[str, Any]) -> dict[str, Any]:
    """Returns the answers of a model in memory, or what a model within a bound reaches."""
    packed, bound = Path(job["packed"]), job.get("weight_memory_bytes")
    llm = open_model(Path(job["model"]), packed, bound or _ALL)
    try:
        if bound is None:
            found = {}
            for count in job["requests"]:
                answer(llm, count, 2, is_drawn=job["mixture"])
                found[count] = asdict(answer(llm, count, job["tokens"], is_drawn=job["mixture"]))
            return {"weights": stream_of(llm).num_bytes, "answers": found}
        (count,) = job["requests"]
        args = argparse.Namespace(tokens=job["tokens"], mixture=job["mixture"], checkpoint=None)
        one, _ = measure(llm, packed_file(packed), count, args, Answers(**job["answers"]))
        return asdict(one) | {
            "anonymous": memory_parts()["anonymous"],
            "in_memory": stream_of(llm).num_bytes,
        }
    finally:
        llm.shutdown()


if __name__ == "__main__":
    print(json.dumps(measured(json.load(sys.stdin))))
