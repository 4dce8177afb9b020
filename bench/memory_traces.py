"""Traces for bench/memory_policy.py: who asks what, and how long the answer really is.

Published ones have the lengths, clients and max_tokens of bench/load/published.py, which says
what of them is known and what assumed. embedded_trace is of the embedded model itself: prompts
of its corpus and the lengths of its greedy answers, asked for through the library when the
benchmark runs; max_tokens as there.
"""

from __future__ import annotations

from bench.corpus import mixed_requests
from bench.load.calls import Call
from bench.load.published import with_max_tokens


def embedded_trace(count: int, max_model_len: int, seed: int = 0) -> list[Call]:
    """The embedded model's own requests."""
    from serve import LLM, SamplingParams

    conversations = [[dict(turn) for turn in dialog] for dialog in mixed_requests(seed, count)]
    params = SamplingParams(max_tokens=None, temperature=0.0)
    with LLM(max_model_len=max_model_len) as llm:
        outputs = llm.chat(conversations, params, use_tqdm=False)
    return with_max_tokens(
        [0] * len(outputs),
        [len(output.prompt_token_ids) for output in outputs],
        [len(output.outputs[0].token_ids) for output in outputs],
        max_model_len,
    )
