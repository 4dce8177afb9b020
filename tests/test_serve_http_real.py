"""Extreme but valid parameters together, on a real engine: an answer or a 400, never a 500."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp
import pytest
import uvloop
from checkpoints import checkpoint

from serve import Engine
from serve.admission import RequestLimits
from serve.chat_template import ChatTemplate
from serve.conversation import encode_chat
from serve.http import HttpServer, HttpSettings
from serve.tokenizer import Tokenizer

EXTREMES: dict[str, list[Any]] = {
    "n": [1, 3],
    "max_tokens": [1, 7],
    "min_tokens": [0, 1],
    "temperature": [0, 1e-4, 2],
    "top_p": [0, 1e-6, 1],
    "top_k": [-1, 0, 1, 2**31],
    "min_p": [0, 1],
    "repetition_penalty": [0.01, 1, 100],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "seed": [-(2**63), 0, 2**63 - 1],
    "stop": ["a", ["e", " t", "zzz"]],
    "stop_token_ids": [[0], list(range(300))],
    "include_stop_str_in_output": [True, False],
    "ignore_eos": [True, False],
    "skip_special_tokens": [True, False],
    "logit_bias": [{"5": 100}, {str(i): -100 for i in range(300)}],
    "logprobs": [0, 5],
    "stream": [True, False],
    "prompt": ["hello", ["a", "naïve 👍🏽"], [1, 2, 3], [[5], [6, 7]], " ", "\n\0"],
}


def test_combinations_of_extremes() -> None:
    rng = random.Random(7)
    bodies = []
    for _ in range(80):
        body: dict[str, Any] = {"prompt": "hello"}
        for name, values in EXTREMES.items():
            if rng.random() < 0.6:
                body[name] = rng.choice([*values, None]) if name != "prompt" else rng.choice(values)
        bodies.append({**body, "model": "m"})

    async def main() -> None:
        engine = Engine(str(checkpoint("llama")), served_model_name="m", max_num_seqs=16)
        async with (
            HttpServer(engine, HttpSettings(port=0)) as server,
            aiohttp.ClientSession(server.url) as session,
        ):
            await asyncio.gather(*(call(session, body) for body in bodies))
            stats = engine.stats()
            assert (stats.num_running, stats.num_waiting) == (0, 0)

    async def call(session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        async with session.post("/v1/completions", json=body) as response:
            text = await response.text()
            assert response.status in (200, 400), (body, text)
            assert '"internal_error"' not in text, (body, text)

    uvloop.run(main())


LIMITS = RequestLimits(max_model_len=4096, vocab_size=320, max_num_waiting=1, max_num_seqs=1)


@pytest.mark.parametrize("seed", range(5))
def test_no_special_id_comes_from_what_a_user_writes(seed: int) -> None:
    """Every special token, whole, cut and nested, in a tokenizer as checkpoints have them."""
    tokenizer = Tokenizer.load(checkpoint("llama"))
    specials = tokenizer.special_token_strings
    assert specials
    rng = random.Random(seed)
    pieces = [*specials, *(text[:2] for text in specials), *(text[2:] for text in specials), " x"]
    content = "".join(rng.choices(pieces, k=200))
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    template = ChatTemplate(source, special_tokens=tokenizer.named_tokens)
    try:
        plain = encode_chat(template, tokenizer, [_user("hello")], LIMITS)
        token_ids = encode_chat(template, tokenizer, [_user(content)], LIMITS)
    finally:
        template.close()
    assert _specials(token_ids, tokenizer) == _specials(plain, tokenizer)
    assert content in tokenizer.decode(token_ids)


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _specials(token_ids: list[int], tokenizer: Tokenizer) -> list[int]:
    return [token for token in token_ids if token in tokenizer.special_ids]
