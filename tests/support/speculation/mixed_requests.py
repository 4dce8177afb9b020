"""Requests of every kind whose answers depend on the tokens before, and all that they give."""

from __future__ import annotations

import random
from typing import Any

from bench.common.scripted_drafts import Answers
from serve import SamplingParams


def requests(vocab_size: int, count: int, most: int) -> tuple[list[Any], list[SamplingParams]]:
    """Returns prompts and parameters of every kind that depends on the tokens before."""
    rng = random.Random(7)
    prompts, params = [], []
    for i in range(count):
        size = rng.choice((1, 7, 30, 90))
        prompts.append({"prompt_token_ids": [rng.randrange(2, vocab_size) for _ in range(size)]})
        some = SamplingParams(
            max_tokens=rng.randint(2, most),
            temperature=rng.choice((0.0, 0.0, 0.8, 1.3)),
            top_k=rng.choice((0, 20)),
            top_p=rng.choice((1.0, 0.9)),
            seed=i,
            repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
            frequency_penalty=rng.choice((0.0, 0.0, 0.4)),
            logprobs=rng.choice((None, None, 0, 3)),
            min_tokens=0 if i % 3 else 2,
            stop_token_ids=() if i % 3 else tuple(range(40, 80)),
            ignore_eos=bool(i % 4),
            n=1 + (i % 7 == 6),
        )
        params.append(some)
    return prompts, params


def answers_of(prompts: list[Any], outputs: list[Any]) -> Answers:
    pairs = zip(prompts, outputs, strict=True)
    return {
        tuple(prompt["prompt_token_ids"]): [list(o.token_ids) for o in each.outputs]
        for prompt, each in pairs
    }


def results(outputs: list[Any]) -> list[Any]:
    """Returns all of the outputs that a client sees."""
    return [
        (o.token_ids, o.text, o.finish_reason, o.stop_reason, o.cumulative_logprob, o.logprobs)
        for each in outputs
        for o in each.outputs
    ]
