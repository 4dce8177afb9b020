"""Traces for bench/simulate/memory_policy.py: who asks what, and how long the answer really is.

Published ones have the lengths, clients and max_tokens of bench/load/workload/published.py,
which says
what of them is known and what assumed. embedded_trace is of the embedded model itself: prompts
of its corpus and the lengths of its greedy answers, asked for through the library when the
benchmark runs; max_tokens as there.
"""

from __future__ import annotations

from bench.load.workload.mixed import mixed_requests
from bench.load.workload.published import Published, published_calls, with_max_tokens
from bench.load.workload.work import Call


def published_trace(trace: Published, count: int, max_model_len: int) -> list[Call]:
    return _bounded(published_calls(trace, count, 0), max_model_len)


def embedded_trace(count: int, max_model_len: int, seed: int = 0) -> list[Call]:
    """The embedded model's own requests."""
    from serve import LLM, SamplingParams

    params = SamplingParams(max_tokens=None, temperature=0.0)
    with LLM(max_model_len=max_model_len) as llm:
        outputs = llm.chat(mixed_requests(seed, count), params, use_tqdm=False)
    calls = with_max_tokens(
        [0] * len(outputs),
        [len(output.prompt_token_ids) for output in outputs],
        [len(output.outputs[0].token_ids) for output in outputs],
    )
    return _bounded(calls, max_model_len)


def _bounded(calls: list[Call], max_model_len: int) -> list[Call]:
    """Prompts are cut to half of the context, answers to the rest; a request without a max_tokens
    of its own may fill it."""
    bounded = []
    for call in calls:
        assert call.num_output is not None
        prompt = min(call.num_prompt, max_model_len // 2)
        room = max_model_len - prompt
        max_tokens = room if call.max_tokens is None else min(call.max_tokens, room)
        output = min(call.num_output, room)
        bounded.append(Call(prompt, output, max_tokens, client=call.client))
    return bounded
