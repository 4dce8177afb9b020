"""Measures what publishing K/V events costs a step: `python -m bench.engine.kv_events`.

New prompts fill the prefix cache and evict one another, so that every page
is told twice; a subscriber reads along in a process of its own. The recorder's time in the compute
thread and the publisher's processor time are set against the time of the steps; runs with and
without events, in turn, show both together.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import time
from typing import Any

from serve import LLM, SamplingParams
from serve.request import TokensPrompt

_PROMPT_TOKENS, _ANSWER_TOKENS = 256, 64
_KV_BYTES = 4 << 20


class Stopwatch:
    """Adds up the time in some methods of an object."""

    def __init__(self, target: Any, names: tuple[str, ...]) -> None:
        self.seconds, self.calls = 0.0, 0
        for name in names:
            setattr(target, name, self._timed(getattr(target, name)))

    def _timed(self, method: Any) -> Any:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args)
            finally:
                self.seconds += time.perf_counter() - began
                self.calls += 1

        return timed


def _subscribe(address: str) -> None:
    import zmq

    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.subscribe("")
        sub.connect(address)
        while True:
            sub.recv_multipart()


def _prompts(seed: int, count: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(range(10, 1000), k=_PROMPT_TOKENS) for _ in range(count)]


def _run(llm: LLM, seed: int, count: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=_ANSWER_TOKENS, ignore_eos=True)
    began = time.perf_counter()
    prompts: list[TokensPrompt] = [{"prompt_token_ids": each} for each in _prompts(seed, count)]
    llm.generate(prompts, params)
    return time.perf_counter() - began


def _load(kv_events: str | None) -> LLM:
    return LLM(
        kv_cache_bytes=_KV_BYTES,
        max_model_len=512,
        max_num_seqs=8,
        compute_threads=1,
        kv_events=kv_events,
        kv_events_topic="kv@bench@model" if kv_events else None,
    )


def measure(count: int, repeats: int) -> dict[str, float]:
    """Runs `count` prompts `repeats` times with and without events. Returns the figures."""
    with _load("tcp://*:0") as on, _load(None) as off:
        loaded = on._loaded
        assert loaded.recorder is not None and loaded.events is not None
        address = loaded.events.endpoints[0].replace("0.0.0.0", "127.0.0.1")
        reader = multiprocessing.get_context("spawn").Process(
            target=_subscribe, args=(address,), daemon=True
        )
        reader.start()
        for llm in (on, off):
            _run(llm, 0, count)
        watch = Stopwatch(loaded.recorder, ("begin", "end", "inserted", "removed"))
        steps = loaded.core.view.steps
        steps_before, seconds_before = steps.num_steps, steps.seconds.sum
        clock = time.pthread_getcpuclockid(loaded.events._thread.ident or 0)
        cpu_before = time.clock_gettime(clock)
        ratios = []
        for number in range(1, repeats + 1):
            with_events, without = _run(on, number, count), _run(off, number, count)
            ratios.append(with_events / without)
        num_steps = steps.num_steps - steps_before
        step_s = (steps.seconds.sum - seconds_before) / num_steps
        cpu_s = time.clock_gettime(clock) - cpu_before
        reader.terminate()
        evicted = on.stats().prefix_evicted_pages
    recorder_s = watch.seconds / num_steps
    return {
        "steps": num_steps,
        "evicted_pages": evicted,
        "step_us": 1e6 * step_s,
        "recorder_us_per_step": 1e6 * recorder_s,
        "recorder_percent": 100 * recorder_s / step_s,
        "publisher_percent": 100 * cpu_s / num_steps / step_s,
        "with_over_without": statistics.median(ratios),
        "least_ratio": min(ratios),
        "greatest_ratio": max(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    print(json.dumps(measure(args.prompts, args.repeats), indent=1))


if __name__ == "__main__":
    main()
