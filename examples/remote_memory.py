"""Runs attention on two memory nodes that hold the K/V; here they are processes of this machine.

Usage: python -m examples.remote_memory [MODEL]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from serve import LLM, SamplingParams

PROMPTS = ["Once there was a fox", "One day a little cat", "Once there was a brave knight"]


def start_node(url: str, stack: ExitStack) -> None:
    """Starts `serve node URL`, which the stack terminates.

    With tcp:// a node can run on any machine. It then needs a key: --memory-node-key-file here, and
    memory_node_key_file in `LLM`."""
    command = [sys.executable, "-m", "serve", "node", url, "--kv-cache-bytes", "64M"]
    node = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(node.wait)
    stack.callback(node.terminate)
    while not Path(url.removeprefix("shm://")).exists():
        if node.poll() is not None:
            raise SystemExit(f"the node at {url} did not start")
        time.sleep(0.05)


def main(model: str | None = None) -> None:
    params = SamplingParams(max_tokens=32, temperature=0.8, top_p=0.95, seed=1)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        urls = [f"shm://{folder}/{name}" for name in ("one", "two")]
        for url in urls:
            start_node(url, stack)
        llm = stack.enter_context(LLM(model, memory_nodes=urls, kv_cache_bytes=64 << 20))
        for output in llm.generate(PROMPTS, params, use_tqdm=False):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
        stats = llm.stats()
        print(f"{stats.memory_nodes} nodes, {stats.pages_total} pages of K/V on them")


if __name__ == "__main__":
    main(*sys.argv[1:])
