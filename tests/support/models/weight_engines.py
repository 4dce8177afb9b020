"""Engines that start from one another's weights, within a test."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from serve import LLM, SamplingParams

SETTINGS = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "kv_cache_bytes": 8 << 20,
    "packed_cache": "off",
    "dtype": "int8",
}
KINDS = (  # family, variant and dtype of models whose packed weights differ in kind
    ("llama", "base", "int8"),
    ("llama", "base", "bfloat16"),
    ("llama", "gptq", "int8"),
    ("qwen3_moe", "head-24", "int4"),
    ("deepseek_v3", "yarn", "int8"),
    ("qwen3_next", "odd", "int8"),
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [3, 5, 8, 13, 21, first]} for first in (30, 40)]


def without_weights(path: Path, folder: Path) -> Path:
    """Copies a model's directory, but for its weights."""
    bare = folder / "bare"
    bare.mkdir()
    for file in path.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and "index" not in file.name:
            shutil.copy(file, bare)
    return bare


@contextlib.contextmanager
def engine(path: Path, key_file: Path, **settings: object) -> Iterator[LLM]:
    with LLM(str(path), **(SETTINGS | {"weights_key_file": key_file} | settings)) as llm:
        yield llm


def start(path: Path, key_file: Path, **settings: object) -> None:
    """Starts an engine and ends it."""
    with engine(path, key_file, **settings):
        pass


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
