"""The built-in model with K/V of running sequences on the disk, and the answers it must give."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serve import LLM
from serve.config import DEFAULT_MODEL, EngineConfig
from serve.loading.runtime import load_runtime
from tests.whole.test_recent_tokens import answers, params, prompt

OFF, QUEST = "off", "quest:budget=64"
LENGTHS = (15, 16, 127, 250, 400, 420, 440, 517)
SETTINGS: dict[str, Any] = {"dtype": "int8", "max_model_len": 640, "max_num_seqs": 8}


def prompts() -> list[list[int]]:
    return [prompt(length, seed=length) for length in LENGTHS]


@functools.cache
def expected(policy: str, kv_dtype: str = "int8") -> list[object]:
    """Returns the answers with all K/V in memory."""
    settings = {"kv_policy": policy, "kv_dtype": kv_dtype, **SETTINGS}
    with LLM(DEFAULT_MODEL, prefix_cache=False, **settings) as llm:
        return answers(llm, prompts(), params(24))


@functools.cache
def needed_bytes(policy: str, kv_dtype: str = "int8") -> int:
    """Returns the K/V of all prompts and answers at once, with bounds."""
    runtime = load_runtime(
        EngineConfig(
            DEFAULT_MODEL,
            kv_policy=policy,
            kv_dtype=kv_dtype,
            kv_cache_bytes=1 << 30,
            kv_offload_bytes=1 << 20,
            **SETTINGS,
        )
    )
    pages = sum(runtime.kv.pages_for(length + 24) for length in LENGTHS)
    num_bytes = pages * runtime.kv.page_bytes
    memory = runtime.memory
    del runtime
    memory.close()
    return num_bytes


@contextlib.contextmanager
def offloaded(folder: Path, policy: str, share: float, **settings: Any) -> Iterator[LLM]:
    """An engine with memory for a share of the K/V of `prompts`, and for recent tokens of int4
    K/V."""
    kv_dtype = settings.get("kv_dtype", "int8")
    needed = needed_bytes(policy, kv_dtype)
    in_memory = int(needed * share)
    config = SETTINGS | {"kv_policy": policy, "kv_cache_bytes": in_memory} | settings
    config["kv_offload_bytes"] = needed - in_memory
    if kv_dtype == "int4":
        config["kv_cache_bytes"] += recent_bytes(config["max_num_seqs"])
    with LLM(DEFAULT_MODEL, kv_offload_dir=folder, **config) as llm:
        yield llm
        core = llm._loaded.core
        core.kv.check_integrity()
    assert not list(folder.iterdir()), "the file has no name"


def recent_bytes(num_sequences: int) -> int:
    """Returns what recent tokens of so many sequences take in memory: two blocks of each, and the
    rows of a step, in tiles of 24 KiB."""
    return (num_sequences * 256 + 256) // 16 * (24 << 10)
