"""Replicas that lend K/V memory: sequences at once, the lender's first tokens, and call-backs.

    python -m bench.nodes.lending

Two processes with the built-in model, each on a core of its own: a lender that has requests from
time to time, and a replica with little memory that always has more requests than fit. It runs
first without the lender's memory, then with it. At the end the lender needs its memory itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO, Any

from serve import LLM, SamplingParams
from serve.config import DEFAULT_MODEL

_MIB = 1 << 20
_SETTINGS: dict[str, Any] = {
    "dtype": "int8",
    "max_num_seqs": 24,
    "max_model_len": 512,
    "compute_threads": 1,
    "memory_policy": "prompt_only",
    "seed": 1,
}
_PROMPT_TOKENS, _OUTPUT_TOKENS = 200, 120
_NUM_FIRST = 150  # first tokens that are timed in each phase
_PAUSE_S = 0.03  # between two of the lender's requests
_OWN_TOKENS = 480  # of the requests that take the lender's memory back


def _prompts(count: int, length: int, first: int = 0) -> list[list[int]]:
    return [
        [(n * 37 + i * (n % 11 + 3)) % 3000 + 5 for i in range(length)]
        for n in range(first, first + count)
    ]


def _params(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def _pin(number: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


def _replica(urls: list[str]) -> None:
    """Runs the full replica until a line comes in; prints what it did."""
    _pin(1)
    most, num_tokens, is_over = 0, 0, threading.Event()
    waits: list[float] = []
    with LLM(DEFAULT_MODEL, kv_cache_bytes=_MIB, borrow=tuple(urls), **_SETTINGS) as llm:

        def watch() -> None:
            nonlocal most
            while not is_over.wait(0.005):
                most = max(most, llm.stats().num_running)

        def end() -> None:
            sys.stdin.readline()
            is_over.set()

        watching = threading.Thread(target=watch)
        watching.start()
        threading.Thread(target=end, daemon=True).start()
        print(json.dumps("ready"), flush=True)
        began_s, number = time.monotonic(), 0
        while not is_over.is_set():
            prompts = _prompts(48, _PROMPT_TOKENS, number)
            number += len(prompts)
            outputs = llm.generate(prompts, _params(_OUTPUT_TOKENS), use_tqdm=False)
            num_tokens += sum(len(o.outputs[0].token_ids) for o in outputs)
            metrics = [o.metrics for o in outputs if o.metrics is not None]
            waits += [(m.first_token_s or m.arrival_s) - m.arrival_s for m in metrics]
            if any(o.outputs[0].finish_reason != "length" for o in outputs):
                raise RuntimeError("a request has failed")
        seconds = time.monotonic() - began_s
        watching.join()
        stats = llm.stats()
    rate = num_tokens / seconds
    counts = [stats.num_preemptions, stats.recomputed_sequences]
    print(json.dumps([most, rate, *counts, *_quantiles(sorted(waits))]), flush=True)


def _read(stream: IO[str] | None) -> Any:
    assert stream is not None
    line = stream.readline()
    if not line:
        raise RuntimeError("the replica has ended")
    return json.loads(line)


def _first_tokens(llm: LLM) -> list[float]:
    """Returns the times to the first token of the lender's requests, in ms, rising."""
    times = []
    for prompt in _prompts(_NUM_FIRST, 96, 1000):
        time.sleep(_PAUSE_S)
        began_s = time.monotonic()
        llm.generate([prompt], _params(1), use_tqdm=False)
        times.append(1e3 * (time.monotonic() - began_s))
    return sorted(times)


def _quantiles(times: list[float]) -> list[float]:
    return [times[int(share * (len(times) - 1))] for share in (0.5, 0.99)]


def _call_back(llm: LLM) -> tuple[float, float]:
    """Returns the seconds until nothing is lent after the lender's requests came, and the MiB."""
    num_bytes, began_s = llm.stats().kvp_lent_bytes, time.monotonic()
    prompts = _prompts(24, _OWN_TOKENS, 5000)
    thread = threading.Thread(target=lambda: llm.generate(prompts, _params(20), use_tqdm=False))
    thread.start()
    while llm.stats().kvp_lent_bytes and time.monotonic() < began_s + 10:
        time.sleep(0.001)
    seconds = time.monotonic() - began_s
    thread.join()
    if llm.stats().num_preemptions:
        raise RuntimeError("one of the lender's own sequences was preempted")
    return seconds, num_bytes / _MIB


def _phase(llm: LLM, urls: list[str], *, calls_back: bool) -> None:
    command = [sys.executable, "-m", "bench.nodes.lending", *(urls or ["alone"])]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdin is not None
        _read(child.stdout)
        time.sleep(2)
        p50, p99 = _quantiles(_first_tokens(llm))
        lent = llm.stats().kvp_lent_bytes / _MIB
        found = _call_back(llm) if calls_back else None
        child.stdin.write("\n")
        child.stdin.flush()
        most, rate, num_preempted, num_again, wait_s, longest_s = _read(child.stdout)
    print(
        f"{'with' if urls else 'without'} borrowed memory ({lent:.3g} MiB): {most} sequences at "
        f"once, {rate:.0f} tokens/s, first token of its 48 requests p50 {wait_s:.2f} s, p99 "
        f"{longest_s:.2f} s, {num_preempted} preemptions, {num_again} computed again; "
        f"lender's first token p50 {p50:.1f} ms, p99 {p99:.1f} ms"
    )
    if found is not None:
        print(
            f"called back: {found[1]:.3g} MiB in {found[0]:.3f} s, no lender's sequence preempted"
        )


def main() -> None:
    if len(sys.argv) > 1:
        _replica([url for url in sys.argv[1:] if url != "alone"])
        return
    _pin(0)
    with tempfile.TemporaryDirectory() as folder:
        url = f"shm://{folder}/lender"
        lends: dict[str, Any] = {"lend": url, "lend_bytes": 6 * _MIB, "kv_cache_bytes": 8 * _MIB}
        with LLM(DEFAULT_MODEL, **lends, **_SETTINGS) as llm:
            _first_tokens(llm)
            p50, p99 = _quantiles(_first_tokens(llm))
            print(f"alone on the machine: lender's first token p50 {p50:.1f} ms, p99 {p99:.1f} ms")
            for number in range(2):
                _phase(llm, [], calls_back=False)
                _phase(llm, [url], calls_back=number == 1)


if __name__ == "__main__":
    main()
