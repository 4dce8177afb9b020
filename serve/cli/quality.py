"""Measures how much a precision changes a model, by its predictions on a text.

The figures are perplexity, KL divergence and greedy agreement. The text is cut into windows that
are each read from an empty context, by the decoder and the attention that serve requests. The
first precision is the reference of the others, which may be those of other files of the model.
"""

from __future__ import annotations

import errno
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memory.attention.seam import AttentionStep
from serve.config import EngineConfig
from serve.engine.pools import ComputeThread
from serve.errors import ConfigError
from serve.loading.precision import resolve_precision
from serve.loading.runtime import Runtime, load_runtime
from serve.models import read_spec
from serve.single_file.config import with_directory
from serve.text.tokenizer import Tokenizer

CHUNK = 128  # rows of a step, and of the logits in memory
Floats = npt.NDArray[np.float32]


class Variant(NamedTuple):
    """One row of the table. model: a directory with the same tokenizer; "": that of the others."""

    dtype: str
    kv_dtype: str = "auto"
    model: str = ""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The figures of one precision on a text.

    kl: the mean over tokens of KL(reference || this), in nats. agreement: the share of positions
    whose most likely next token is that of the reference.
    """

    precision: str
    num_tokens: int
    perplexity: float
    kl: float
    agreement: float
    kv_bytes_per_token: int

    def change_from(self, reference: Evaluation) -> float:
        """Returns the relative change of the perplexity."""
        return self.perplexity / reference.perplexity - 1


def evaluate(
    model: str,
    text: str,
    precisions: Sequence[tuple[str, ...]],
    *,
    max_tokens: int = 4096,
    window: int = 512,
    weight_group: int = 64,
    kv_group: int = 64,
    tokenizer: str | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> list[Evaluation]:
    """Evaluates variants, the reference first; one model is loaded at a time.

    A temporary file of max_tokens * vocabulary * 4 bytes holds the reference's distributions.
    """
    # other settings keep their defaults, so that kv_bytes_per_token is that of a server
    config = with_directory(
        EngineConfig(model=model, tokenizer=tokenizer, weight_group=weight_group, kv_group=kv_group)
    )
    loaded = Tokenizer.load(config.tokenizer_path, model=config.model_path)
    windows = _windows(loaded, text, max_tokens, window)
    if not windows:
        raise ConfigError("the text has fewer than two tokens; nothing can be predicted")
    configs = _configs(config, [Variant(*one) for one in precisions])
    results: list[Evaluation] = []
    with tempfile.TemporaryDirectory(prefix="mergestep-eval-") as folder:
        store = _Store(Path(folder) / "reference.f32", sum(len(w) - 1 for w in windows))
        for one in configs:
            report(f"{_named(one, config)}{one.dtype}, K/V {one.kv_dtype}")
            compute = ComputeThread()
            try:
                job = compute.submit(lambda c=one: _evaluate(c, windows, store))  # type: ignore[misc]
                found = job.result()
                results.append(replace(found, precision=_named(one, config) + found.precision))
            finally:
                compute.stop()
            store.is_written = True
    return results


def _configs(config: EngineConfig, variants: Sequence[Variant]) -> list[EngineConfig]:
    """Returns a configuration for each variant; ConfigError if one is not supported."""
    vocab_size = read_spec(config.model_path).vocab_size
    configs = []
    for dtype, kv_dtype, model in variants:
        one = replace(config, dtype=dtype, kv_dtype=kv_dtype)
        if model:
            one = with_directory(replace(one, model=model, served_model_name=None))
        configs.append(one)
    for one in configs:
        spec = read_spec(one.model_path)
        if spec.vocab_size != vocab_size:
            raise ConfigError(
                f"{one.model} has {spec.vocab_size} tokens, and {config.model} has {vocab_size}"
            )
        resolve_precision(one, spec)
    return configs


def _named(config: EngineConfig, reference: EngineConfig) -> str:
    """Returns the start of a row's name, which names a model that is not that of the others."""
    return "" if config.model == reference.model else f"{config.model_name}: "


class _Store:
    """A file of the reference's log-probabilities, [tokens, vocab] fp32."""

    def __init__(self, path: Path, num_tokens: int) -> None:
        self._path = path
        self._num_tokens = num_tokens
        self._table: Floats | None = None
        self.is_written = False

    def rows(self, vocab_size: int) -> Floats:
        if self._table is None:
            shape = (self._num_tokens, vocab_size)
            self._allocate(4 * self._num_tokens * vocab_size)
            self._table = np.memmap(self._path, np.float32, "r+", shape=shape)
        return self._table

    def _allocate(self, size_bytes: int) -> None:
        """Allocates the file, since a full disk would end the process by SIGBUS later."""
        with self._path.open("wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size_bytes)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                raise ConfigError(
                    f"max_tokens {self._num_tokens} needs {size_bytes >> 20} MiB for the "
                    f"reference in {self._path.parent.parent}, which lacks that space; "
                    "lower max_tokens or set TMPDIR to another directory"
                ) from error


def _windows(tokenizer: Tokenizer, text: str, max_tokens: int, window: int) -> list[list[int]]:
    tokens = tokenizer.encode(text)[:max_tokens]
    cut = [tokens[i : i + window] for i in range(0, len(tokens), window)]
    return [part for part in cut if len(part) > 1]


def _evaluate(config: EngineConfig, windows: list[list[int]], store: _Store) -> Evaluation:
    runtime = load_runtime(config)
    try:
        return _measure(runtime, windows, store)
    finally:
        memory = runtime.memory
        del runtime  # its views of the K/V memory must go first
        memory.close()


@torch.inference_mode()
def _measure(runtime: Runtime, windows: list[list[int]], store: _Store) -> Evaluation:
    table = store.rows(runtime.spec.vocab_size)
    loss = kl = 0.0
    row = agreed = 0
    for tokens in windows:
        for start, logprobs in _read(runtime, tokens):
            if start + len(logprobs) == len(tokens):
                logprobs = logprobs[:-1]  # nothing follows the last token
            count = len(logprobs)
            following = torch.tensor(tokens[start + 1 : start + 1 + count])
            loss -= float(logprobs.gather(1, following[:, None]).double().sum())
            if not store.is_written:
                table[row : row + count] = logprobs.numpy()
            reference = torch.from_numpy(np.array(table[row : row + count])).double()
            kl += float((reference.exp() * (reference - logprobs.double())).sum())
            agreed += int((reference.argmax(-1) == logprobs.argmax(-1)).sum())
            row += count
    return Evaluation(
        str(runtime.precision),
        row,
        math.exp(loss / row),
        kl / row,
        agreed / row,
        runtime.kv.token_bytes,
    )


def _read(runtime: Runtime, tokens: list[int]) -> Iterator[tuple[int, Tensor]]:
    """Yields (first position, log-probabilities [n, vocab] fp32) for each chunk of a window."""
    kv = runtime.kv
    if len(tokens) > kv.max_model_len:
        raise ConfigError(f"window {len(tokens)} is longer than the model's {kv.max_model_len}")
    item = kv.open(len(tokens))
    try:
        for start in range(0, len(tokens), CHUNK):
            part = tokens[start : start + CHUNK]
            end = start + len(part)
            assert kv.grow(item, end, start), "a single sequence always fits"
            kv.commit()
            step = AttentionStep(0, [item.start], [len(part)], [end])
            device = runtime.model.device
            hidden = runtime.model.forward(
                torch.tensor(part, device=device),
                torch.arange(start, end, device=device),
                runtime.attention.plan(step),
            )
            yield start, torch.log_softmax(runtime.model.logits(hidden), -1).cpu()
    finally:
        kv.close(item)
