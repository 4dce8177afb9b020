"""The engine process of bench/nodes/node_faults.py: keeps some requests running and tells, in
lines of JSON, what its clients see and when its recovery notices something.

    python -m bench.nodes.fault_engine '{"nodes": ["tcp://..."], "key_file": "...", ...}'

Without nodes it answers every prompt once: what is right. It ends when its input does.
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

from serve import Engine, SamplingParams
from serve.engine import node_recovery as recovery
from serve.request import FinishReason

NUM_PROMPTS = 12
_TOKENS = 120
_STREAMS = 3
_STATUS_S = 0.1
_lock = threading.Lock()


def tell(**event: object) -> None:
    with _lock:
        print(json.dumps(event), flush=True)


class _Log(logging.Handler):
    """What recovery and links have to say."""

    def emit(self, record: logging.LogRecord) -> None:
        tell(kind="log", at=time.monotonic(), text=record.getMessage())


def _prompt(number: int) -> list[int]:
    """Some begin alike; of 20 to 130 tokens."""
    generator = torch.Generator().manual_seed(number // 2)
    length = 20 + 10 * number
    return [int(token) for token in torch.randint(300, 1000, (length,), generator=generator)]


async def _ask(engine: Engine, number: int) -> None:
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
    except Exception as failed:
        reason, error = "error", repr(failed)
        await asyncio.sleep(0.2)  # it may be so for a while
    tell(
        kind="request",
        prompt=number,
        began=began,
        tokens=tokens,
        times=times,
        reason=str(reason),
        error=error,
    )


async def _serve(settings: dict[str, Any]) -> None:
    is_over = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(is_over.set)

    nodes = settings["nodes"]
    if nodes:
        threading.Thread(target=wait, daemon=True).start()
        more = {"memory_nodes": tuple(nodes), "memory_node_key_file": settings["key_file"]}
        more["memory_partition"] = settings["partition"]
    else:
        more = {}
    async with Engine(
        dtype="float32", max_num_seqs=8, compute_threads=1, max_model_len=512, **more
    ) as engine:
        if not nodes:
            for number in range(NUM_PROMPTS):
                await _ask(engine, number)
            return
        numbers = count()

        async def keep_asking() -> None:
            while not is_over.is_set():
                await _ask(engine, next(numbers) % NUM_PROMPTS)

        async def keep_telling() -> None:
            while not is_over.is_set():
                tell(kind="status", pages=engine.stats().pages_total)
                await asyncio.sleep(_STATUS_S)

        tell(kind="ready")
        await asyncio.gather(keep_telling(), *[keep_asking() for _ in range(_STREAMS)])


def main() -> None:
    settings = json.loads(sys.argv[1])
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    for name in ("serve.engine.node_recovery", "memory"):
        logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger(name).addHandler(_Log())
    # so that a run has more faults than pauses: nodes are taken back sooner than usual
    recovery.SETTLED_S = 1.0
    asyncio.run(_serve(settings))


if __name__ == "__main__":
    main()
