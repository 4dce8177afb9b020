"""Measures what pulling K/V from another engine saves, and what asking for it costs.

    python -m bench.engine.kv_pull --model random:llama-1b --prompt 2048

Two engines on this machine, each with one thread; the second one gets prompts that the first one
has computed, and others. The first one is idle, or decodes four streams meanwhile.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from bench.common.checkpoints import model_directory
from bench.common.second_engine import second_engine, wait_until_connected
from bench.common.tables import print_medians
from memory.prefix.peer_stats import PullStats
from serve import LLM, SamplingParams

_ROOM = 1600  # tokens of the context beside the prompt
_ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
_LONG = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)


def _hold(settings: dict[str, Any], prompts: list[list[int]], pipe: Connection) -> None:
    """The first engine: computes the prompts, then decodes or rests as it is told."""
    with LLM(**settings) as llm:
        llm.generate(prompts, _ONE, use_tqdm=False)
        peers = llm.stats().kv_peers
        assert peers is not None
        pipe.send(peers.url)
        texts = [[300 + k] * 20 for k in range(4)]
        while pipe.recv() == "decode":
            work = threading.Thread(target=lambda: llm.generate(texts, _LONG, use_tqdm=False))
            work.start()
            while not llm.stats().num_running:
                time.sleep(0.01)
            pipe.send(True)
            work.join()


def measure(model: str, length: int, repeats: int) -> dict[str, Any]:
    """Returns milliseconds to the first token, and the rate of pulling."""
    rng = random.Random(1)
    prompts = [[rng.randrange(10, 1000) for _ in range(length)] for _ in range(4 * repeats)]
    idle, busy, unknown, plain = (prompts[i * repeats : (i + 1) * repeats] for i in range(4))
    base: dict[str, Any] = {
        "model": model,
        "max_model_len": length + _ROOM,
        "max_num_seqs": 8,
        "compute_threads": 1,
    }
    found: dict[str, Any] = {}
    with second_engine(_hold, base, idle + busy) as (holder, key):
        url = holder.recv()
        with LLM(**base) as llm:
            found["computed_ms"] = _each(llm, plain)
        with LLM(**{**base, "kv_peer_key_file": key, "kv_peers": [url]}) as llm:
            wait_until_connected(lambda: llm.stats().kv_peers)
            found["asked in vain_ms"] = _each(llm, unknown)
            found["pulled_ms"] = _each(llm, idle)
            pulled, page_bytes = _pulls(llm), llm.stats().kv_page_bytes
            found["pages"], found["page_bytes"] = pulled.pulled, page_bytes
            found["pull_MB_per_s"] = pulled.pulled * page_bytes / max(1e-9, pulled.seconds) / 1e6
            holder.send("decode")
            holder.recv()
            found["pulled while it decodes_ms"] = _each(llm, busy)
        holder.send("end")
        return found


def _each(llm: LLM, prompts: list[list[int]]) -> list[float]:
    return [_first_token_ms(llm, ids) for ids in prompts]


def _first_token_ms(llm: LLM, token_ids: list[int]) -> float:
    (output,) = llm.generate({"prompt_token_ids": token_ids}, _ONE, use_tqdm=False)
    metrics = output.metrics
    assert metrics is not None and metrics.first_token_s is not None
    return 1e3 * (metrics.first_token_s - metrics.arrival_s)


def _pulls(llm: LLM) -> PullStats:
    peers = llm.stats().kv_peers
    assert peers is not None
    (found,) = peers.pulls.values()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="random:llama-1b")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="short, as a test of the command")
    args = parser.parse_args()
    if args.smoke:
        args.model, args.prompt, args.repeats = "random:tiny", 400, 2
    path = model_directory(args.model)
    found = measure(str(path), args.prompt, args.repeats)
    print_medians(found)


if __name__ == "__main__":
    main()
