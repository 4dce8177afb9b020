"""Which requests are sent."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench.corpus import mixed_requests
from bench.load.work import Work


def mixed(count: int, seed: int, output_len: int | None) -> list[Work]:
    """The embedded model's own mixture of conversations; output_len only bounds the answer."""
    return [
        Work(messages=[dict(message) for message in messages], max_tokens=output_len)
        for messages in mixed_requests(seed, count)
    ]


def random_tokens(
    count: int, seed: int, input_len: int, output_len: int, tokens: Sequence[int]
) -> list[Work]:
    """Exact lengths, of random tokens."""
    rng = random.Random(f"prompts-{seed}")
    return [
        Work(token_ids=rng.choices(tokens, k=input_len), max_tokens=output_len, ignore_eos=True)
        for _ in range(count)
    ]
