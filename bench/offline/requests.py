"""Fixed sets of requests, the same for every engine that answers them."""

from __future__ import annotations

import math
import random

from bench.load.workload.datasets import DatasetSettings, load_calls
from bench.load.workload.prompts import make_works
from bench.load.workload.work import Work
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.models import read_spec

_LEAST = 16
_FIRST_TOKEN = 300  # lower token ids may be special


def mixed_lengths(
    count: int, seed: int, max_prompt: int, max_output: int, vocab_size: int
) -> list[Work]:
    """Returns requests of random tokens with log-uniform lengths from _LEAST on: many are short and
    a few are long."""
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
    dataset: str | None = None,
) -> list[Work]:
    """Returns `count` requests.

    dataset is a name of bench.load.workload.datasets. Without it, prompts have exactly input_len
    tokens and answers output_len, by default 128. Without both, the requests are the embedded
    model's mixed requests or, for another model, mixed lengths with answers of at most output_len.
    Raises ConfigError for lengths that the model's context does not hold."""
    if count < 1:
        raise ConfigError(f"requests must be a positive number, not {count}")
    for name, value in (("input_len", input_len), ("output_len", output_len)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be a positive number of tokens, not {value}")
    spec = read_spec(EngineConfig.from_settings(model).model_path)
    if dataset is None and input_len is None and model is not None:
        most = min(512, spec.max_model_len // 2)
        answer = min(output_len or 128, spec.max_model_len // 2)
        return mixed_lengths(count, seed, most, answer, spec.vocab_size)
    answer = output_len or 128
    if input_len is not None and input_len + answer > spec.max_model_len:
        raise ConfigError(
            f"input_len {input_len} and {answer} tokens to answer exceed the model's context of"
            f" {spec.max_model_len}"
        )
    settings = DatasetSettings(
        dataset or ("mixed" if input_len is None else "random"),
        input_len=None if input_len is None else str(input_len),
        output_len=None if output_len is None else str(output_len),
        max_model_len=spec.max_model_len,
    )
    tokens = range(min(_FIRST_TOKEN, spec.vocab_size // 2), spec.vocab_size)
    return make_works(load_calls(settings, count, seed, []), seed, tokens)
