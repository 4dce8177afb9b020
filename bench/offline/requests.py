"""Fixed sets of requests: the same whoever answers them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from bench.load.datasets import DatasetSettings, load_calls
from bench.load.prompts import make_works
from bench.load.work import Work
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.models import read_spec

_LEAST = 16
_FIRST_TOKEN = 300  # what comes before may be special


def mixed_lengths(
    count: int, seed: int, max_prompt: int, max_output: int, vocab_size: int
) -> list[Work]:
    """Random tokens, lengths log-uniform from 16: many short ones, a few long ones."""
    rng = random.Random(seed)

    def length(most: int) -> int:
        return round(math.exp(rng.uniform(math.log(min(_LEAST, most)), math.log(most))))

    prompts = [
        [rng.randrange(_FIRST_TOKEN, vocab_size) for _ in range(length(max_prompt))]
        for _ in range(count)
    ]
    return [
        Work(token_ids=prompt, max_tokens=length(max_output), ignore_eos=True) for prompt in prompts
    ]


def fixed_requests(
    model: str | None,
    *,
    count: int,
    seed: int = 0,
    input_len: int | None = None,
    output_len: int | None = None,
) -> list[Work]:
    """With input_len exact lengths (128 tokens to answer by default). Without it the embedded
    model's own mixture, or mixed lengths for another model, output_len at most. ConfigError."""
    if count < 1:
        raise ConfigError(f"requests must be a positive number, not {count}")
    for name, value in (("input_len", input_len), ("output_len", output_len)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be a positive number of tokens, not {value}")
    config = EngineConfig.from_settings(model)
    spec = read_spec(config.model_path)
    if input_len is not None:
        answer = output_len or 128
        if input_len + answer > spec.max_model_len:
            raise ConfigError(
                f"input_len {input_len} and {answer} tokens to answer are more than the model's"
                f" context of {spec.max_model_len}"
            )
        tokens = range(min(_FIRST_TOKEN, spec.vocab_size // 2), spec.vocab_size)
        return _of_dataset("random", count, seed, str(input_len), answer, tokens)
    if model is None:
        return _of_dataset("mixed", count, seed, None, output_len, ())
    most = min(512, spec.max_model_len // 2)
    answer = min(output_len or 128, spec.max_model_len // 2)
    return mixed_lengths(count, seed, most, answer, spec.vocab_size)


def _of_dataset(
    name: str,
    count: int,
    seed: int,
    input_len: str | None,
    output_len: int | None,
    tokens: Sequence[int],
) -> list[Work]:
    limit = None if output_len is None else str(output_len)
    settings = DatasetSettings(name, input_len=input_len, output_len=limit)
    return make_works(load_calls(settings, count, seed, []), seed, tokens)
