"""Models beyond a real limit of memory: python -m bench.streaming.limited.

A model with random weights and llama.cpp with the same weights, mapped, are measured in turns under
the same limit. That is what --free leaves of a machine on which nothing else runs: a process takes
the rest (ballast.py), and the system drops cached pages as under any limit. Without --free the
limit is the one that this process has already, a cgroup's or a guest's; then --prepare, outside,
writes into --folder what needs more memory: packed weights, and the answers with all of them in
memory. Printed are medians of the rounds:

    limit    bytes that are available at the start of each process
    equal    whether all answers were those of the model in memory
    tok/s    tokens a second of requests with prompts of eight tokens
    disk     what the disk gives to direct reads of the same bytes, in the same processes
    share    of the disk that streaming uses
    held     of llama.cpp's file in its memory at the end, after its own memory
    ratio    of the tokens a second

Each number of requests has processes of its own. --share is that of the weights that may be in
memory here; what the process takes beside them is within the limit, as for llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.common.checkpoint_shapes import config_of
from bench.common.checkpoints import cache_folder, random_checkpoint
from bench.streaming.ballast import limit
from bench.streaming.run import child, llama_child, mixture_checkpoint, prompts
from serve.cli.config_file import parse_size
from serve.machine import available_memory, memory_parts

_ANSWERS = "answers.json"
_LLAMA_3B = {
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "head_dim": 128,
}


@dataclass(slots=True)
class Round:
    """What one process each found; bytes, seconds. free: available at their starts."""

    here: dict[str, Any]
    llama: dict[str, float]
    free: list[int] = field(default_factory=list)


def here(job: dict[str, Any]) -> dict[str, Any]:
    return child([sys.executable, "bench.streaming.limited_model"], job)


def prepare(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Returns the answers in memory and the bytes of all weights; the first call computes them."""
    file = folder / _ANSWERS
    if file.exists():
        known: dict[str, Any] = json.loads(file.read_text())
        has_all = set(job["requests"]) <= set(known["job"]["requests"])
        if has_all and known["job"] | {"requests": job["requests"]} == job:
            return known
    found = here(job) | {"job": job}
    file.write_text(json.dumps(found))
    return found


def llama_cpp(args: argparse.Namespace, tokens: Sequence[Sequence[int]]) -> dict[str, float]:
    """Returns what llama.cpp takes for the same tokens."""
    asked = prompts(len(tokens))
    sequences = [prompt + list(answer) for prompt, answer in zip(asked, tokens, strict=True)]
    job = {"sequences": sequences, "prompt": len(asked[0])}
    found: dict[str, float] = llama_child("bench.streaming.mapped_model", args, job)
    found["tokens_s"] = len(tokens) * len(tokens[0]) / found["seconds"]
    return found


def median(rounds: Sequence[Round], name: str, program: str = "here") -> float:
    return statistics.median(getattr(each, program)[name] for each in rounds)


def row(count: int, rounds: Sequence[Round], file_bytes: int) -> list[str]:
    tokens, theirs = median(rounds, "tokens_s"), median(rounds, "tokens_s", "llama")
    shares = [each.here["read_rate"] / each.here["disk_rate"] for each in rounds]
    free = [free for each in rounds for free in each.free]
    cells = [
        str(count),
        f"{min(free) / 1e6:,.0f}-{max(free) / 1e6:,.0f}",
        "yes" if all(each.here["is_equal"] for each in rounds) else "NO",
        f"{tokens:.2f}",
        f"{median(rounds, 'read_rate') / 1e6:,.0f}",
        f"{median(rounds, 'disk_rate') / 1e6:,.0f}",
        f"{statistics.median(shares):.0%}",
        f"{theirs:.2f}",
        f"{statistics.median(e.llama['read'] / e.llama['seconds'] for e in rounds) / 1e6:,.0f}",
        f"{median(rounds, 'file', 'llama') / file_bytes:.0%}",
        f"{tokens / theirs:.2f}",
    ]
    if rounds[0].here["hits"] is not None:
        cells.append(f"{median(rounds, 'hits'):.1%}")
    return cells


def checkpoint(args: argparse.Namespace) -> Path:
    if args.mixture:
        return mixture_checkpoint()
    if args.model:
        return random_checkpoint(args.model)
    return random_checkpoint("llama-3b", config_of("llama-1b") | _LLAMA_3B)


def run(args: argparse.Namespace) -> dict[int, list[Round]]:
    console = Console(width=130)
    model = checkpoint(args)
    folder = args.folder or cache_folder() / f"limited-{model.name}"
    folder.mkdir(parents=True, exist_ok=True)
    counts = [int(each) for each in args.requests.split(",")]
    job = {"model": str(model), "packed": str(folder), "requests": counts}
    job |= {"tokens": args.tokens, "mixture": args.mixture}
    known = prepare(folder, job)
    if args.prepare:
        return {}
    bound = int(known["weights"] * (args.share or (0.5 if args.mixture else 1 / 3)))
    found: dict[int, list[Round]] = {count: [] for count in counts}
    with limit(args.free) as level:
        for number in range(args.rounds):
            for count in counts:
                answers = known["answers"][str(count)]
                mine = job | {"requests": [count], "answers": answers}
                mine["weight_memory_bytes"] = bound
                one = Round({}, {})
                for turn in range(2):
                    level()
                    # the libraries of this process can be dropped
                    one.free.append(available_memory() + memory_parts()["file"])
                    if turn == number % 2:
                        one.here = here(mine)
                    else:
                        one.llama = llama_cpp(args, answers["tokens"])
                level()  # fails if the limit was not held to the end
                found[count].append(one)
    report(console, found, known["weights"], args.gguf.stat().st_size)
    return found


def report(console: Console, found: dict[int, list[Round]], weights: int, file_bytes: int) -> None:
    every = [each for rounds in found.values() for each in rounds]
    memory = (median(every, "in_memory"), median(every, "anonymous"))
    console.print(
        f"here {weights / 1e6:,.0f} MB of weights, {memory[0] / 1e6:,.0f} MB in memory, with all"
        f" else {memory[1] / 1e6:,.0f} MB; llama.cpp maps {file_bytes / 1e6:,.0f} MB and takes"
        f" {median(every, 'anonymous', 'llama') / 1e6:,.0f} MB beside them"
    )
    names = ["requests", "limit MB", "equal", "tok/s", "read MB/s", "disk MB/s", "share"]
    names += ["llama.cpp", "read MB/s", "held", "ratio"]
    names += ["hits"] if every[0].here["hits"] is not None else []
    table = Table(*names)
    for count, rounds in found.items():
        table.add_row(*row(count, rounds, file_bytes))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a shape of bench.common; by default Llama-3.2-3B's")
    parser.add_argument("--mixture", action="store_true", help="a mixture, half of it in memory")
    parser.add_argument("--share", type=float, help="of the weights that are in memory")
    parser.add_argument("--free", type=parse_size, help="bytes that are left of the machine's")
    parser.add_argument("--requests", default="1,8,32", help="at once, comma-separated")
    parser.add_argument("--tokens", type=int, default=12, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="of packed weights, on the disk of --gguf")
    parser.add_argument("--prepare", action="store_true", help="measure nothing yet")
    parser.add_argument("--llama-python", help="a Python with llama-cpp-python and gguf")
    parser.add_argument("--gguf", type=Path, help="the same weights for llama.cpp")
    parser.add_argument("--json", type=Path, help="where the figures of all rounds are written")
    args = parser.parse_args()
    if not args.prepare and not (args.llama_python and args.gguf):
        parser.error("--llama-python and --gguf are needed to measure")
    found = run(args)
    if args.json and found:
        rounds = {
            n: [{"here": e.here, "llama": e.llama, "free": e.free} for e in each]
            for n, each in found.items()
        }
        args.json.write_text(json.dumps(rounds, indent=1))


if __name__ == "__main__":
    main()
