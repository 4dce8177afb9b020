"""The common part of the peers' runners: options, and the tasks of `serve bench latency`.

The runners are scripts for the peer's own virtual environment. They import nothing of this package
but this file, which lies beside them, and download nothing. `serve bench latency` starts them with
--sequences, --tokens and --threads, sends a task per line to their stdin and reads an answer per
line from their stdout (bench/offline/peers.py).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

Prompt = list[int]
Request = tuple[Prompt, int]  # a prompt and the number of tokens of its answer


class Skip(Exception):
    """A mode does not do this kind of task."""


class Peer(Protocol):
    """An engine that decodes greedily and does not stop at an end token. modes: ways to run it, of
    which `serve bench latency` takes the fastest at each column."""

    name: str
    modes: tuple[str, ...]

    def use(self, mode: str) -> None:
        """Prepares a mode. The calls that follow run in it."""
        ...

    def first_token_s(self, prompt: Prompt) -> float:
        """Returns the seconds from the prompt to its first token."""
        ...

    def decode_s(self, prompts: list[Prompt], num_steps: int) -> float:
        """Returns the seconds of num_steps steps in which all prompts are decoded."""
        ...

    def answer_s(self, requests: list[Request]) -> float:
        """Returns the seconds to answer all requests, which arrive at once."""
        ...


def options(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="model, converted as described above")
    parser.add_argument("--sequences", type=int, default=32, help="most sequences at once")
    parser.add_argument("--tokens", type=int, default=1024, help="most tokens of a sequence")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser


def serve(args: argparse.Namespace, load: Callable[[argparse.Namespace], Peer]) -> None:
    """Loads the peer and answers tasks until stdin ends."""
    # what libraries print goes to stderr
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    peer = load(args)
    send({"peer": peer.name, "modes": peer.modes})
    mode = None
    for line in sys.stdin:
        task = json.loads(line)
        try:
            if task["mode"] != mode:
                mode = None  # if it cannot be prepared, the next task tries again
                peer.use(task["mode"])
                mode = task["mode"]
            send({"seconds": _seconds(peer, task)})
        except Skip as reason:
            send({"skip": str(reason)})
        except Exception as error:
            traceback.print_exc()
            first_line = str(error).strip().partition("\n")[0]
            send({"error": f"{type(error).__name__}: {first_line}"})


def vocab_size(folder: Path) -> int:
    """Returns the vocabulary's size from the folder's config.json."""
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def _seconds(peer: Peer, task: dict[str, Any]) -> list[float]:
    prompts, answers = task["prompts"], task["answers"]
    if task["kind"] == "prefill":
        return [peer.first_token_s(prompt) for prompt in prompts]
    if task["kind"] == "decode":
        return [peer.decode_s(prompts, answers[0])]
    return [peer.answer_s(list(zip(prompts, answers, strict=True)))]
