"""Traces for bench/memory_policy.py and bench/node_cost.py: when who asks what, and how long the
answer really is.

The public traces are not shipped. What is made here has their mean prompt and answer (SYSTEMS
2.7: Azure-Conv 1154.7 and 211.1, Azure-Code 2047.8 and 27.9, Kimi-Conv 12035.1 and 342.6, Kimi-TA
8560.0 and 182.1 tokens) and is log-normal, with the medians of the Azure traces (1020 and 129,
1500 and 13) and sigma 1 for Kimi's. Assumed, not measured: 24 clients of Zipf-like activity;
40 % of the variance of log length lies between the clients (an application's answers resemble
each other) and the rest within; prompt and answer of a client correlate by 0.3. Two clients of
three leave max_tokens unset; the others send the round figure (256, 1024, 4096 ...) above their
longest answer in twenty, so that some answers are cut. Lengths are clipped to the context.
Arrivals are Poisson.

embedded_trace is of the embedded model itself: prompts of its corpus and the lengths of its
greedy answers, asked for through the library when the benchmark runs; max_tokens as above.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from bench.corpus import mixed_requests

NUM_CLIENTS = 24
BETWEEN_CLIENTS = 0.4
CORRELATION = 0.3
ROUND_FIGURES = (64, 256, 1024, 4096, 16384)


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a trace. gap: exponential with mean 1, before it arrives. num_output: the
    answer's own length; max_tokens may cut it."""

    gap: float
    client: str
    num_prompt: int
    num_output: int
    max_tokens: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean and median of prompts and answers, in tokens."""

    prompt_mean: float
    prompt_median: float
    output_mean: float
    output_median: float


AZURE_CONV = Lengths(1154.7, 1020, 211.1, 129)
AZURE_CODE = Lengths(2047.8, 1500, 27.9, 13)
KIMI_CONV = Lengths(12035.1, 12035.1 / math.exp(0.5), 342.6, 342.6 / math.exp(0.5))
KIMI_TA = Lengths(8560.0, 8560.0 / math.exp(0.5), 182.1, 182.1 / math.exp(0.5))


def lognormal_trace(lengths: Lengths, count: int, max_model_len: int, seed: int = 0) -> list[Call]:
    rng = random.Random(f"memory-trace-{seed}")
    between, within = math.sqrt(BETWEEN_CLIENTS), math.sqrt(1 - BETWEEN_CLIENTS)
    prompt_sigma = math.sqrt(2 * math.log(lengths.prompt_mean / lengths.prompt_median))
    output_sigma = math.sqrt(2 * math.log(lengths.output_mean / lengths.output_median))
    clients = [(rng.gauss(0, 1), rng.gauss(0, 1)) for _ in range(NUM_CLIENTS)]
    drawn: list[tuple[int, int, int]] = []
    activity = [1 / (1 + i) for i in range(NUM_CLIENTS)]
    for client in rng.choices(range(NUM_CLIENTS), activity, k=count):
        own = rng.gauss(0, 1)
        other = CORRELATION * own + math.sqrt(1 - CORRELATION**2) * rng.gauss(0, 1)
        prompt = prompt_sigma * (between * clients[client][0] + within * own)
        output = output_sigma * (between * clients[client][1] + within * other)
        drawn.append((client, lengths.prompt_median * math.exp(prompt), math.exp(output)))
    return _calls(_scaled(drawn, lengths), max_model_len, rng)


def _scaled(drawn: list[tuple[int, float, float]], lengths: Lengths) -> list[tuple[int, int, int]]:
    """The sample's own means become those of the trace: with 24 clients they are far off."""
    prompts = lengths.prompt_mean * len(drawn) / sum(prompt for _, prompt, _ in drawn)
    outputs = lengths.output_mean * len(drawn) / sum(output for _, _, output in drawn)
    return [
        (client, max(1, round(prompt * prompts)), max(1, round(output * outputs)))
        for client, prompt, output in drawn
    ]


def embedded_trace(count: int, max_model_len: int, seed: int = 0) -> list[Call]:
    """The embedded model's own requests."""
    from serve import LLM, SamplingParams

    conversations = [[dict(turn) for turn in dialog] for dialog in mixed_requests(seed, count)]
    params = SamplingParams(max_tokens=None, temperature=0.0)
    with LLM(max_model_len=max_model_len) as llm:
        outputs = llm.chat(conversations, params, use_tqdm=False)
    lengths = [(0, len(o.prompt_token_ids), len(o.outputs[0].token_ids)) for o in outputs]
    return _calls(lengths, max_model_len, random.Random(f"memory-trace-{seed}"))


def _calls(
    lengths: list[tuple[int, int, int]], max_model_len: int, rng: random.Random
) -> list[Call]:
    calls = []
    figures = {}
    for client in {client for client, _, _ in lengths}:
        outputs = sorted(output for owner, _, output in lengths if owner == client)
        longest = outputs[int(0.95 * (len(outputs) - 1))]
        figures[client] = min((n for n in ROUND_FIGURES if n > longest), default=max_model_len)
    for client, prompt, output in lengths:
        prompt = min(prompt, max_model_len // 2)
        room = max_model_len - prompt
        max_tokens = min(figures[client], room) if client % 3 == 2 else room
        calls.append(
            Call(rng.expovariate(1.0), f"client-{client}", prompt, min(output, room), max_tokens)
        )
    return calls
