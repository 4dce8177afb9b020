"""The engine process of bench/nodes/node_faults.py. It keeps some requests running and prints, as
lines of JSON, what its clients receive and what node recovery logs.

    python -m bench.nodes.fault_engine '{"nodes": ["tcp://..."], "key_file": "...", ...}'

Without nodes it answers every prompt once, which gives the expected tokens. It ends when its
standard input is closed.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import signal
import sys
import threading
import time
from itertools import count
from typing import Any

import torch

from memory.nodes import node_health
from serve import Engine, SamplingParams
from serve.engine import node_recovery as recovery
from serve.request import FinishReason

NUM_PROMPTS = 12
_TOKENS = 120
_STREAMS = 3
_STATUS_S = 0.1
_lock = threading.Lock()


def print_event(**event: object) -> None:
    with _lock:
        print(json.dumps(event), flush=True)


class _Log(logging.Handler):
    """Prints what node recovery and the links to nodes log."""

    def emit(self, record: logging.LogRecord) -> None:
        print_event(kind="log", at=time.monotonic(), text=record.getMessage())


def _prompt(number: int) -> list[int]:
    """Returns a prompt of 20 to 130 tokens. Two prompts at a time begin with the same tokens."""
    generator = torch.Generator().manual_seed(number // 2)
    length = 20 + 10 * number
    return [int(token) for token in torch.randint(300, 1000, (length,), generator=generator)]


async def _send_request(engine: Engine, number: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True)
    tokens: list[int] = []
    times: list[float] = []
    reason: FinishReason | str | None = None
    error: str | None = None
    began = time.monotonic()
    try:
        async for delta in engine.stream(_prompt(number), params):
            tokens += delta.token_ids
            times.append(time.monotonic())
            reason, error = delta.finish_reason, delta.error
    except Exception as raised:
        reason, error = "error", repr(raised)
        await asyncio.sleep(0.2)  # the next request may fail for the same reason
    print_event(
        kind="request",
        prompt=number,
        began=began,
        tokens=tokens,
        times=times,
        reason=str(reason),
        error=error,
    )


async def _serve(settings: dict[str, Any]) -> None:
    is_ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait_for_end() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(is_ended.set)

    nodes = settings["nodes"]
    if nodes:
        threading.Thread(target=wait_for_end, daemon=True).start()
        node_settings = {
            "memory_nodes": tuple(nodes),
            "memory_node_key_file": settings["key_file"],
            "memory_node_encryption": "on",
            "memory_partition": settings["partition"],
        }
    else:
        node_settings = {}
    async with Engine(
        dtype="float32", max_num_seqs=8, compute_threads=1, max_model_len=512, **node_settings
    ) as engine:
        if not nodes:
            for number in range(NUM_PROMPTS):
                await _send_request(engine, number)
            return
        numbers = count()

        async def send_requests() -> None:
            while not is_ended.is_set():
                await _send_request(engine, next(numbers) % NUM_PROMPTS)

        async def print_status() -> None:
            while not is_ended.is_set():
                print_event(kind="status", pages=engine.stats().pages_total)
                await asyncio.sleep(_STATUS_S)

        print_event(kind="ready")
        await asyncio.gather(print_status(), *[send_requests() for _ in range(_STREAMS)])


def main() -> None:
    settings = json.loads(sys.argv[1])
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    for name in ("serve.engine.node_recovery", "memory"):
        logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger(name).addHandler(_Log())
    # The engine takes nodes back sooner than usual, so that a run has more faults.
    recovery.SETTLED_S = 1.0
    node_health.PROBATION_S = (1.0,)
    node_health.MIN_PROBES = 1
    asyncio.run(_serve(settings))


if __name__ == "__main__":
    main()
