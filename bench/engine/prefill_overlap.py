"""Measures how much of a transfer a first token waits for if the K/V of a prompt is pulled chunk by
chunk while another engine computes it.

    python -m bench.engine.prefill_overlap --transport tcp --chunks 8 --rate 16

Two engines on this machine, each with one thread. A prompt of some chunks is computed by the first;
the second gets it after that, so that it waits for all of the transfer, or at the same time. The
first sends pages at a limited rate, as over a slow network, so that the transfer takes a while.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

from bench.common.checkpoints import model_directory
from bench.common.second_engine import second_engine, wait_until_connected
from bench.common.tables import print_medians
from memory.peers.page_server import PageServer
from serve import LLM, SamplingParams

_ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
_TOKENS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
_AWAITED = _TOKENS.changed(awaits_prefill=True)


class _SlowServer(PageServer):
    """Sends at most so many bytes a second."""

    bytes_per_s = 0.0

    def _post_pages(self, endpoint: Any, number: int, first: int, names: Any, buffer: Any) -> bool:
        time.sleep(len(names) * self._page_bytes / self.bytes_per_s)
        return super()._post_pages(endpoint, number, first, names, buffer)


def _prefill(settings: dict[str, Any], bytes_per_s: float, pipe: Connection) -> None:
    """The engine for prefill: computes the prompts that it gets, and says when each was done."""
    from serve.loading import kv_peers

    _SlowServer.bytes_per_s = bytes_per_s
    setattr(kv_peers, "PageServer", _SlowServer)  # noqa: B010
    with LLM(**settings) as llm:
        peers = llm.stats().kv_peers
        assert peers is not None
        pipe.send(peers.url)
        while (prompt := pipe.recv()) is not None:
            (output,) = llm.generate({"prompt_token_ids": prompt}, _ONE, use_tqdm=False)
            assert output.metrics is not None
            pipe.send(output.metrics.first_token_s)


def _first(
    llm: LLM, token_ids: list[int], params: SamplingParams
) -> tuple[float, float, list[int]]:
    """Returns when a prompt arrived, when its first token came, and the tokens."""
    (output,) = llm.generate({"prompt_token_ids": token_ids}, params, use_tqdm=False)
    metrics = output.metrics
    assert metrics is not None and metrics.first_token_s is not None
    return metrics.arrival_s, metrics.first_token_s, list(output.outputs[0].token_ids)


def measure(
    model: str, chunk: int, chunks: int, repeats: int, bytes_per_s: float, transport: str
) -> dict[str, Any]:
    """Returns milliseconds: the whole transfer, what of it a first token waited for, and the time
    of a first token whose prompt is here."""
    rng = random.Random(1)
    length = chunk * chunks
    prompts = [[rng.randrange(10, 1000) for _ in range(length)] for _ in range(2 * repeats)]
    base: dict[str, Any] = {
        "model": model,
        "max_model_len": length + 64,
        "max_num_seqs": 4,
        "compute_threads": 1,
        "speculation": "off",
        "max_num_batched_tokens": chunk,
    }
    found: dict[str, list[float]] = {"hit": [], "whole": [], "exposed": [], "computing": []}
    with LLM(**base) as llm:
        expected = [_first(llm, prompt, _TOKENS)[2] for prompt in prompts]
    with second_engine(_prefill, base, bytes_per_s, transport=transport) as (other, key):
        with LLM(**base, kv_peer_key_file=key, kv_peers=(other.recv(),)) as llm:
            wait_until_connected(lambda: llm.stats().kv_peers)
            _first(llm, prompts[0][::-1], _TOKENS)  # so that it knows what steps take
            for number, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True)):
                began_s = time.monotonic()
                other.send(prompt)
                ended_s = other.recv() if number % 2 else None
                arrived_s, first_s, said = _first(llm, prompt, _AWAITED)
                assert said == tokens, "tokens have changed"
                again = _first(llm, prompt, _TOKENS)
                assert again[2] == tokens, "tokens have changed"
                hit_s = again[1] - again[0]
                found["hit"].append(1e3 * hit_s)
                if ended_s is not None:
                    found["whole"].append(1e3 * (first_s - arrived_s - hit_s))
                else:
                    ended_s = other.recv()
                    found["exposed"].append(1e3 * (first_s - ended_s - hit_s))
                    found["computing"].append(1e3 * (ended_s - began_s))
            peers = llm.stats().kv_peers
        other.send(None)
    assert peers is not None
    (pulls,) = peers.pulls.values()
    ratio = statistics.median(found["exposed"]) / statistics.median(found["whole"])
    limit = 1.3 / chunks
    return {**found, "pulled pages": pulls.pulled, "exposed / whole": ratio, "1.3 / k": limit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="random:llama-1b")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of a chunk")
    parser.add_argument("--chunks", type=int, default=8, help="of a prompt")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--rate", type=float, default=16.0, help="MB/s of the transfer")
    parser.add_argument("--transport", choices=("tcp", "shm"), default="tcp")
    parser.add_argument("--smoke", action="store_true", help="short, as a test of the command")
    args = parser.parse_args()
    if args.smoke:
        args.model, args.chunk, args.chunks, args.repeats = "random:tiny", 64, 4, 1
    found = measure(
        str(model_directory(args.model)),
        args.chunk,
        args.chunks,
        args.repeats,
        1e6 * args.rate,
        args.transport,
    )
    print_medians(found, ", ms")


if __name__ == "__main__":
    main()
